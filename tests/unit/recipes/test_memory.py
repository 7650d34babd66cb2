"""Activations of a planned recipe are those that a real step of its model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import import_libraries
from recipe_runs import make_inputs, settings

import loopwright as lw
from loopwright.planning.live_memory import LiveMemory
from loopwright.planning.simulation import Training, measure
from loopwright.recipes.memory import count_sizes, plan_memory, sum_of_states
from loopwright.recipes.model.loading import open_model
from loopwright.strategies.traits import MemoryShares


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_libraries()
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    "changes", [{"method": "full"}, {}, {"precision": "bf16-mixed"}, {"method": "full", "gradient_checkpointing": True}]
)
def test_activations_are_those_of_a_real_step(inputs: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    wanted = settings(inputs, tmp_path / "run", **changes)
    planned = plan_memory(wanted, count_sizes(wanted.model_settings()), MemoryShares()).activations
    ids = torch.zeros(wanted.micro_batch, wanted.max_length, dtype=torch.int64)
    task = Training(
        lambda: open_model(wanted.model_settings()),
        (ids, ids),
        optimizers=lambda model: torch.optim.SGD(model.parameters()),
        loss=sum_of_states,
    )
    fabric = lw.Fabric(accelerator="cpu", devices=1, precision=wanted.precision)
    real = fabric.launch(lambda fabric: measure(fabric, task, task.build(), task.batch, LiveMemory()))
    assert planned == pytest.approx(max(one["activations"] for one in real.moments), rel=0.03)
    # The closed form, which counts what blocks keep, is too low for small models.
    assert planned > 1e5


def test_autocast_keeps_no_copies_of_parameters_that_a_strategy_casts(inputs: Path, tmp_path: Path) -> None:
    wanted = settings(inputs, tmp_path / "run", method="full", precision="bf16-mixed", micro_batch=1, max_length=4)
    sizes = count_sizes(wanted.model_settings())
    plain, cast = (
        plan_memory(wanted, sizes, MemoryShares(casts_parameters=value)).activations for value in (False, True)
    )
    blocks = sizes.trained - sizes.vocab * sizes.hidden
    assert plain - cast > blocks  # of the 2 bytes of each parameter in a block, most at the peak
