from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.errors import ConfigError, ModuleError
from loopwright.strategies import STRATEGY_REGISTRY, MeshStrategy
from loopwright.strategies.mesh.pipeline import Pipeline


def test_a_name_with_options_makes_the_strategy() -> None:
    made: Any = STRATEGY_REGISTRY.create("Mesh:dp=2,fsdp=-1")
    assert isinstance(made, MeshStrategy)
    assert (made.axes.dp, made.axes.fsdp) == (2, -1)


def test_fsdp_takes_what_is_left_unless_another_axis_does() -> None:
    assert MeshStrategy(dp=2).axes.fsdp == -1
    assert MeshStrategy(dp=-1).axes.fsdp == 1


def test_a_strategy_without_options_refuses_them() -> None:
    with pytest.raises(ConfigError, match="name of DDPStrategy without options, got ':tp=2' after it"):
        lw.Trainer(strategy="ddp:tp=2", devices=2, accelerator="cpu")


def test_an_unknown_name_with_options_is_named() -> None:
    with pytest.raises(ConfigError, match="registered strategy, got strategy='mehs:tp=2'"):
        lw.Trainer(strategy="mehs:tp=2", devices=2, accelerator="cpu")


def test_the_number_of_processes_is_compared_before_they_start() -> None:
    with pytest.raises(ConfigError, match=r"Expected 6 processes for the mesh dp=2, fsdp=3 \(2 x 3\), got 4"):
        lw.Trainer(strategy="mesh:dp=2,fsdp=3", devices=4, accelerator="cpu")
    with pytest.raises(ConfigError, match="Expected a multiple of 3 processes for the mesh"):
        lw.Trainer(strategy=MeshStrategy(dp=3), devices=2, num_nodes=2, accelerator="cpu")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"device_mesh": (2, 2)}, r"device_mesh= to be left out of MeshStrategy, got \(2, 2\)"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "sharding_strategy='FULL_SHARD' or 'SHARD_GRAD_OP'"),
        ({"fsdpp": 2}, r"fsdpp= is not an argument of this strategy \(did you mean 'fsdp'\?\)"),
        ({"tensor_plans": {}}, r"tensor_plans= .* \(did you mean 'tensor_plan'\?\)(.|\n)*use some of .*tensor_plan, "),
        ({"timout": 9}, r"timout= .* \(did you mean 'timeout'\?\)"),
    ],
)
def test_arguments_that_contradict_the_axes_are_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        MeshStrategy(dp=2, **arguments)


def test_batches_are_split_for_stages_only() -> None:
    options = Pipeline(micro_batches=4)
    assert MeshStrategy(pp=2, pipeline=options).traits.parts_per_batch == 4
    assert MeshStrategy(tp=2, pipeline=options).traits.parts_per_batch == 1


class Stacked(lw.Module):
    """Blocks in a list.

    Args:
        compiled: Name of the submodule that is compiled; None: none is.
    """

    def __init__(self, *, by_hand: bool = False, compiled: str | None = None) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        if compiled is not None:
            self.get_submodule(compiled).compile(backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("a process has started")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("axes", "module", "arguments", "what"),
    [
        (
            {"tp": 2, "tensor_plan": {"layers.*": "colwise"}},
            Stacked(),
            {},
            r"pattern 'layers\.\*' of tensor_plan matches",
        ),
        ({"pp": 2, "pipeline": Pipeline(split=["blocks.9"])}, Stacked(), {}, "as split point, got 'blocks.9'"),
        ({"pp": 2}, Stacked(by_hand=True), {}, "automatic optimization with pipeline stages, got Stacked"),
        ({"pp": 2}, Stacked(), {"precision": "16-mixed"}, "without loss scaling with pipeline stages, got '16-mixed'"),
        ({"pp": 2}, Stacked(compiled="blocks.1"), {}, "torch.compile within blocks only .* got it on blocks.1"),
        ({"cp": 2}, Stacked(compiled="blocks.1"), {}, "not compiled with cp=2, got torch.compile on blocks.1"),
    ],
)
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_a_module_that_cannot_be_split_is_refused_before_processes_start(
    axes: dict[str, Any], module: Stacked, arguments: dict[str, Any], what: str, start_method: str
) -> None:
    trainer = lw.Trainer(
        accelerator="cpu", strategy=MeshStrategy(**axes, start_method=start_method), devices=2, logger=False,
        enable_checkpointing=False, **arguments,
    )  # fmt: skip
    with pytest.raises((ConfigError, ModuleError), match=what):
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(4, 4))))
