"""Runs on two ranks with sharded checkpoints, exported: plain transformers and peft compute what was trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from recipe_models import import_libraries
from trained_models import model_folder, open_adapter, open_plain, run_folder, trained_state

from loopwright.recipes.exporting.export import ExportSettings, export
from loopwright.recipes.exporting.merge import last_hidden, sample_ids
from loopwright.recipes.inference.generate import GenerateSettings, generate
from loopwright.strategies import FSDPStrategy, MeshStrategy

# Any in this file: strategies.

# Libraries of language models leave threads in a process that has run other tests; forks of it may hang.
OWN_PROCESS = "LOOPWRIGHT_TESTS_OF_EXPORTS"

STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={"LlamaDecoderLayer"}, state_dict_type="sharded"),
    "mesh:tp=2": lambda: MeshStrategy(tp=2, state_dict_type="sharded"),
    "mesh:pp=2": lambda: MeshStrategy(pp=2, state_dict_type="sharded"),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "llama")


def train(rank: int, size: int, name: str, run: Path, base: Path, kind: str) -> None:
    run_folder(run, base, kind, strategy=STRATEGIES[name](), size=size)


def check_export(rank: int, size: int, run: Path, base: Path, kind: str, out: Path) -> None:
    """Export a run, and compare with the stored state."""
    report = export(ExportSettings(run, out))
    state = trained_state(run)
    expected = open_plain(base)
    before = last_hidden(expected, sample_ids(expected))
    if kind == "full":
        expected.load_state_dict(state)
        exported = open_plain(out)
    else:
        exported = open_adapter(base, out)
        expected = open_adapter(base, out)
        with torch.no_grad():
            for one in expected.parameters():
                one.zero_()  # all that counts comes from the base and the checkpoint
        plain = {f"base_model.model.{key}": value for key, value in open_plain(base).state_dict().items()}
        renamed = {key: plain.get(key.replace(".base_layer.", ".")) for key in expected.state_dict()}
        expected.load_state_dict({key: state.get(key, value) for key, value in renamed.items()})
    ids = sample_ids(exported)
    assert report.reloaded == 0
    assert torch.equal(last_hidden(exported, ids), last_hidden(expected, ids))
    assert (last_hidden(exported, ids) - before).abs().max() > 1e-2
    shared: dict[str, Any] = {"prompt": "Question", "max_new_tokens": 8, "temperature": 0, "stream": False}
    assert generate(GenerateSettings(run, **shared)).text == generate(GenerateSettings(out, **shared)).text


@pytest.mark.slow
def test_exports_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-c", str(Path(__file__).parents[2] / "pytest.ini"), "-q"]
    command += ["--rootdir", str(Path(__file__).parents[2]), "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        [*command, "-k", "sharded"], env={**os.environ, OWN_PROCESS: "1"}, capture_output=True, text=True, check=False
    )
    assert "4 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.skipif(OWN_PROCESS not in os.environ, reason="run by test_exports_in_a_process_of_their_own")
@pytest.mark.parametrize(
    ("name", "kind"), [("fsdp", "full"), ("fsdp", "lora"), ("mesh:tp=2", "lora"), ("mesh:pp=2", "full")]
)
def test_a_sharded_checkpoint_is_exported(name: str, kind: str, base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(train, 2, name, run, base, kind, connect=False, timeout_s=120)
    assert (run / "checkpoints" / "last.ckpt").is_dir()
    # In a process of its own: threads of tokenizers and torch, once there, make later forks hang.
    run_ranks(check_export, 1, run, base, kind, tmp_path / "out", connect=False, timeout_s=120)
