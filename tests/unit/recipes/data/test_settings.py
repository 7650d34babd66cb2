"""Invalid settings are all named; sources have paths and weights."""

from __future__ import annotations

from pathlib import Path

from loopwright.recipes.data import DataSettings
from loopwright.recipes.data.settings import DataSource


def test_sources_are_paths_or_mappings() -> None:
    settings = DataSettings(["a.jsonl", {"path": "b", "weight": 0.5}, {"path": "c"}], val_data="v.jsonl")
    assert settings.train_sources() == [DataSource(Path("a.jsonl")), DataSource(Path("b"), 0.5), DataSource(Path("c"))]
    assert settings.val_sources() == [DataSource(Path("v.jsonl"))]
    assert settings.problems() == []


def test_all_invalid_settings_are_named() -> None:
    settings = DataSettings(
        [{"path": "a", "weight": -1}, {"pat": "b"}],
        val_data="v",
        val_fraction=0.5,
        kind="chats",
        train_on="first",
        too_long="trim",
        max_length=1,
        group_by_length=True,
        prompt_style="{question}",
    )
    problems = settings.problems()
    assert [problem.split(":")[0] for problem in problems] == [
        *(
            "kind",
            "train_on",
            "too_long",
            "max_length",
            "val_fraction",
            "group_by_length",
            "prompt_style",
            "data",
            "data",
        )
    ]
    assert "got 'chats' (did you mean 'chat'?)." in problems[0]
    assert all(": Expected " in problem and ", got " in problem for problem in problems)


def test_a_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert DataSettings("data", cache=tmp_path / "none").problems() == []
    (problem,) = DataSettings("data", cache=tmp_path / "file").problems()
    assert problem.startswith("cache: Expected a folder, got the file ")
