from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopwright as lw
from loopwright.errors import ConfigError
from loopwright.fabric.compile_options import CompileOptions, compiler_with, split_options, use_cache_dir
from loopwright.fabric.compiling import read_compile

# Any in this file: options of torch.compile, and what torch gives a backend.


def test_own_options_do_not_reach_torch(tmp_path: Path) -> None:
    given = {"backend": "eager", "cache_dir": tmp_path / "x", "dynamic_dims": 1, "compare": 3}
    own, rest = split_options(given)
    assert own == CompileOptions(str(tmp_path / "x"), (1,), 3)
    assert rest == {"backend": "eager"}
    assert split_options({})[0] == CompileOptions()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"cache_dir": 3}, "a folder"),
        ({"dynamic_dims": -1}, "at least 0"),
        ({"dynamic_dims": [0, "1"]}, "at least 0"),
        ({"dynamic_dims": 1, "dynamic": False}, "either"),
        ({"compare": True}, "number of steps"),
        ({"dynamic_dim": 1}, "did you mean 'dynamic_dims'"),
    ],
)
def test_wrong_values_are_refused(option: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_compile(option)


def test_fabric_has_no_steps_to_compare() -> None:
    with pytest.raises(ConfigError, match="where a step of your loop ends"):
        lw.Fabric(accelerator="cpu").setup(nn.Linear(2, 2), compile={"compare": 2, "backend": "eager"})


def test_the_folder_is_inductors_for_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/elsewhere"):
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with ExitStack() as stack:
            use_cache_dir(str(tmp_path / "new" / "cache"), stack)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "new" / "cache")
            assert (tmp_path / "new" / "cache").is_dir()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    (tmp_path / "file").write_text("")
    with ExitStack() as stack, pytest.raises(ConfigError, match="can be written"):
        use_cache_dir(str(tmp_path / "file" / "cache"), stack)


def test_all_sizes_of_a_dynamic_dimension_have_one_graph() -> None:
    def compiled_for(dims: tuple[int, ...]) -> list[Any]:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        run = compiler_with(lambda function: torch.compile(function, backend=backend), dims)(
            lambda batch: batch["x"].sum() + batch["y"].mean()
        )
        for length in (5, 7, 3, 9):
            batch = {"x": torch.ones(2, length), "y": torch.ones(2)}
            assert run(batch) == 2 * length + 1
        torch._dynamo.reset()
        return graphs

    assert len(compiled_for(())) == 2  # the first size as a constant, then a variable
    assert len(compiled_for((1,))) == 1
