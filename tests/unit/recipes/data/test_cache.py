"""The cache: made once, keyed by what decides about tokens, and never left half written."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from recipe_texts import CHATML, chat, small_tokenizer, write_jsonl

from loopwright.recipes.data import DataSettings, RecipeData
from loopwright.recipes.data.cache import Cache, ProblemList
from loopwright.recipes.data.settings import DataSource
from loopwright.recipes.data.shard import TokenShard


def fill(path: Path, folder: Path, tokenizer: object = None, **settings: object) -> tuple[Path, list[str]]:
    """Tokenize and return the folder and the problems."""
    cache = Cache(folder, DataSettings(path, **settings), tokenizer or small_tokenizer())
    problems = ProblemList()
    cache.fill(DataSource(path), problems)
    return cache.find(DataSource(path)), problems.lines()


def test_a_second_preparation_tokenizes_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    folder, _ = fill(path, tmp_path / "cache")
    before = (folder / "ids.bin").stat().st_mtime_ns
    assert fill(path, tmp_path / "cache") == (folder, [])
    assert (folder / "ids.bin").stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["content", "template", "train_on", "tokens"])
def test_what_decides_about_tokens_makes_another_folder(tmp_path: Path, change: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    first, _ = fill(path, tmp_path / "cache")
    tokenizer, settings = small_tokenizer(), {}
    if change == "content":
        before = path.stat()
        path.write_text(path.read_text().replace("Question", "Riddle!?"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "template":
        tokenizer.chat_template = CHATML + " "
    elif change == "train_on":
        settings["train_on"] = "all"
    else:
        tokenizer.add_tokens(["wizards"])
    second, problems = fill(path, tmp_path / "cache", tokenizer, **settings)
    assert second != first
    assert not problems
    assert second.is_dir()


def test_settings_of_rows_do_not_tokenize_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(1)])
    first, _ = fill(path, tmp_path / "cache")
    assert fill(path, tmp_path / "cache", max_length=64, seed=3, packing=False)[0] == first


def test_data_with_problems_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    folder, problems = fill(path, tmp_path / "cache")
    assert len(problems) == 1
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [f"{folder.name}.lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from recipe_texts import small_tokenizer
from loopwright.recipes.data import DataSettings, RecipeData
from loopwright.recipes.data import cache

publish = cache.publish
def killed(temporary, target):
    print(sorted(one.name for one in temporary.iterdir()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
cache.publish = killed
RecipeData(DataSettings(sys.argv[2]), small_tokenizer(), Path(sys.argv[3])).prepare_data()
"""


def test_a_killed_preparation_is_not_used_and_its_remains_are_removed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(5)])
    support = str(Path(__file__).parents[3] / "support")
    arguments = [sys.executable, "-c", KILLED, support, str(path), str(tmp_path / "cache")]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "manifest.json" in ended.stdout  # it was killed in the last moment
    assert [one.suffix for one in (tmp_path / "cache").iterdir() if one.is_dir()] == [".part"]
    folder, problems = fill(path, tmp_path / "cache")
    assert problems == []
    assert [one for one in (tmp_path / "cache").iterdir() if one.is_dir()] == [folder]


def test_processes_at_the_same_time_make_one_folder(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(50)])
    program = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "publish(temporary, target)")
    support = str(Path(__file__).parents[3] / "support")
    arguments = [sys.executable, "-c", program, support, str(path), str(tmp_path / "cache")]
    started = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sum(output.count("manifest.json") for output in outputs) == 1


def test_tokens_of_another_machine_are_a_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(5)])
    folder, _ = fill(path, tmp_path / "cache")
    moved = folder.rename(tmp_path / "tokens")
    data = RecipeData(DataSettings(moved), small_tokenizer(), tmp_path / "other")
    assert data.problems() == []
    data.setup("fit")
    assert data.report.samples == 5
    other = RecipeData(DataSettings(moved), small_tokenizer(CHATML + " "), tmp_path / "third")
    assert other.problems() == [f"{moved}: Expected tokens of this tokenizer, got those of another one."]


def test_a_long_document_is_tokenized_in_blocks_without_a_change(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    text = "".join(f"line {number} of a document\n" for number in range(20_000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    folder, _ = fill(path, tmp_path / "cache", tokenizer)
    shard = TokenShard(folder)
    assert len(shard.offsets) == 2
    assert shard.ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_a_shard_is_pickled_without_its_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(50)])
    shard = TokenShard(fill(path, tmp_path / "cache")[0])
    assert len(shard.ids) > 1_000
    copied = pickle.dumps(shard)
    assert len(copied) < 1_000
    assert np.array_equal(pickle.loads(copied).ids, shard.ids)


PROMPTLESS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
UNENDED = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}\n{% endfor %}"
TAGGED = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2<|im_start|>"}]}


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        (None, chat(1), "a.jsonl:1: Expected a tokenizer with a chat_template for chat data, got one without."),
        (PROMPTLESS, chat(1), "a.jsonl: Expected a trained end token, got none in any answer"),
        (UNENDED, chat(1), "a.jsonl: Expected a trained end token, got none in any answer"),
        (UNENDED, TAGGED, "a.jsonl: Expected a trained end token, got none in any answer"),
        (CHATML, {**TAGGED, "label": False}, "Expected at least one sample, got none: 1 record with label=false."),
        (CHATML, {"input_ids": [3, 4], "labels": [-100, -100]}, "a.jsonl: Expected trained tokens, got none"),
        (CHATML, {"input_ids": [3, 999]}, "the size of the tokenizer, got 999."),
        (CHATML, {"foo": 1}, "got the keys foo."),
        (None, {"instruction": "a", "output": "b"}, "Expected a prompt_style or a tokenizer with a chat template"),
    ],
)
def test_problems_of_the_whole_are_named(tmp_path: Path, template: str, record: dict, expected: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    _, (problem,) = fill(path, tmp_path / "cache", small_tokenizer(template))
    assert expected in problem


def test_ids_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [3, 299]}])
    data = RecipeData(DataSettings(path), tokenizer, tmp_path / "cache")
    assert data.problems(vocab_size=300) == []
    (problem,) = data.problems(vocab_size=299)
    assert problem.startswith(f"{path}: Expected token ids below 299, the rows of the model's embedding, got 299")


def test_answers_behind_max_length_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(3)])
    (problem,) = RecipeData(DataSettings(path, max_length=8), small_tokenizer(), tmp_path / "cache").problems()
    assert problem == (
        "data: Expected samples of at most 8 tokens with a trained one, got none (0 are too long, 3 have no trained "
        "token within max_length)."
    )
