"""Full weights in hooks: `trainer.full_state_dict()`, and an error where this rank's part would be saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import loopwright as lw
from loopwright.strategies import MeshStrategy

# Any in this file: batches, and results that travel between processes.

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"fsdp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "pp x fsdp": {"pp": 2, "fsdp": 2},
}


# transformers (5.24) asks a sharded tensor for its storage.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import_deepspeed()  # which save_pretrained() does: here once, and not in every child


class Net(lw.Module):
    """A small model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(input_ids=batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refused(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises."""
    try:
        call()
    except Exception as error:  # Whatever it is: its text is compared.
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "no error"


class Saves(lw.Callback):
    """Saves as users do: on all ranks, and on rank 0 alone; then as it is right.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts: dict[str, str] = {}

    def save(self, trainer: lw.Trainer, module: Any, when: str) -> None:
        path = self.folder / f"{trainer.global_rank}.pt"
        layers = module.model.model.layers
        self.texts[f"{when}: save"] = refused(lambda: torch.save(module.state_dict(), path))
        self.texts[f"{when}: part"] = refused(
            lambda: torch.save([layer.state_dict() for layer in layers[:: 1 if trainer.is_global_zero else -1]], path)
        )
        # transformers saves on the first rank, whichever calls it.
        if trainer.is_global_zero:
            self.texts[f"{when}: pretrained"] = refused(lambda: module.model.save_pretrained(self.folder / "part"))

    def on_validation_end(self, trainer: lw.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            self.save(trainer, module, "rank 0")

    def on_train_end(self, trainer: lw.Trainer, module: Any) -> None:
        self.save(trainer, module, "all")
        whole, part = trainer.full_state_dict(), trainer.full_state_dict(module.model)
        if trainer.is_global_zero:
            assert {name.removeprefix("model.") for name in whole} == part.keys()
            module.model.save_pretrained(self.folder / "full", state_dict=part)
        else:
            assert whole == part == {}
        trainer.save_checkpoint(self.folder / "full.ckpt")


def fit(rank: int, size: int, axes: dict[str, int], callback: lw.Callback) -> lw.Callback:
    ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(ids), batch_size=2)
    lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(**{"fsdp": 1, **axes}), devices=size, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        accumulate_grad_batches=2, val_check_interval=2, limit_val_batches=1, callbacks=[callback],
    ).fit(Net(), data, data)  # fmt: skip
    return callback


def texts_of(rank: int, size: int, axes: dict[str, int], folder: Path) -> dict[str, str]:
    callback = Saves(folder)
    fit(rank, size, axes, callback)
    return callback.texts


@pytest.mark.parametrize("name", MESHES)
def test_a_part_is_not_saved_as_if_it_were_everything(name: str, tmp_path: Path) -> None:
    axes = MESHES[name]
    for rank, texts in enumerate(run_ranks(texts_of, math.prod(axes.values()), axes, tmp_path, connect=False)):
        assert len(texts) == (6 if rank == 0 else 2)
        for what, text in texts.items():
            if name.startswith("pp") or not what.endswith("pretrained"):
                assert "trainer.full_state_dict(module)" in text, (what, text)
            else:  # the Trainer adds the call where it ends the run
                assert "invalid python storage" in text, (what, text)
    saved = torch.load(tmp_path / "full.ckpt", weights_only=True)["state_dict"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "full").state_dict()
    assert {name.removeprefix("model."): value.tolist() for name, value in saved.items()} == {
        name: value.tolist() for name, value in loaded.items()
    }


class Pretrained(lw.Callback):
    """Saves in the form of transformers, on every rank."""

    def on_train_end(self, trainer: lw.Trainer, module: Any) -> None:
        module.model.save_pretrained("unwritten")


class Alone(lw.Callback):
    """Asks for full weights on rank 0 alone."""

    def on_train_end(self, trainer: lw.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            trainer.full_state_dict()


def failing(rank: int, size: int, axes: dict[str, int], callback: lw.Callback, folder: Path) -> tuple[str, float]:
    import os

    os.chdir(folder)
    began = time.monotonic()
    text = refused(lambda: fit(rank, size, axes, callback))
    return text, time.monotonic() - began


def test_saving_in_the_form_of_transformers_names_what_to_call(tmp_path: Path) -> None:
    found = run_ranks(failing, 2, MESHES["fsdp"], Pretrained(), tmp_path, connect=False)
    assert "state = trainer.full_state_dict(module) on every rank" in found[0][0]


@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_a_call_on_one_rank_alone_is_an_error_and_not_a_hang(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(failing, 2, MESHES[name], Alone(), tmp_path, connect=False)
    assert "trainer.full_state_dict was called on rank 0, but rank 1 has continued without it" in first[0]
    assert "rank 0" in second[0]
