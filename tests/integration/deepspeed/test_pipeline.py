"""DeepSpeed's PipelineModule on two processes, against one: passes, clipping, checkpoints, refusals.

What needs four processes is in tests/integration/deepspeed/slow/test_pipeline_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import Trained, batch, check_fabric, check_trainer, fabric_of, fit, layers, pipe
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn

import loopwright as lw
from loopwright.errors import CheckpointError, ConfigError, DataError, ModuleError
from loopwright.strategies import DeepSpeedStrategy


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


def test_stages_train_as_one_process_and_checkpoints_hold_all_of_them(tmp_path: Path) -> None:
    check_fabric(2, 2, tmp_path)


def test_the_trainer_trains_stages_as_one_process(tmp_path: Path) -> None:
    check_trainer(2, 2, False, tmp_path)


# --- tied layers, and what is refused -------------------------------------------------------------------------------


def forward_tied(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight


def tied_layers() -> list[Any]:
    from deepspeed.pipe import TiedLayerSpec

    tied = {"bias": False, "tied_weight_attr": ["weight"]}
    return [
        TiedLayerSpec("one", nn.Linear, 6, 4, **tied),
        nn.Linear(4, 4),
        nn.Tanh(),
        TiedLayerSpec("one", nn.Linear, 6, 4, forward_fn=forward_tied, **tied),
    ]


def check_tied(fabric: lw.Fabric, rank: int, folder: str) -> None:
    """Compare the norm and the weights of a layer that is in both stages with a loop."""
    torch.manual_seed(5)
    made = tied_layers()
    net = pipe(2, layers=made)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    place = f"{folder}/tied-{fabric.strategy.stage}.ckpt"
    fabric.save(place, {"model": model})
    start = torch.load(place, weights_only=True)["model"]
    shared = nn.Parameter(start["tied_modules.one.weight"].clone())
    middle = nn.Linear(4, 4)
    middle.load_state_dict({"weight": start["1.weight"], "bias": start["1.bias"]})
    by_hand = torch.optim.Adam([shared, *middle.parameters()], lr=0.1)
    x = batch(1)[0]
    for _ in range(2):
        fabric.backward(model.train_batch((x, x)))
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
        loss = nn.functional.mse_loss(torch.tanh(middle(x @ shared.T)) @ shared, x)
        loss.backward()
        wanted = nn.utils.clip_grad_norm_([shared, *middle.parameters()], 0.2)
        by_hand.step()
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-5)
    fabric.save(place, {"model": model, "optimizer": optimizer})
    saved = torch.load(place, weights_only=True)
    assert list(saved["model"]) == ["tied_modules.one.weight", "1.weight", "1.bias"]
    assert torch.allclose(saved["model"]["tied_modules.one.weight"], shared, atol=1e-5)
    assert torch.allclose(saved["optimizer"]["state"][0]["exp_avg"], by_hand.state[shared]["exp_avg"], atol=1e-6)
    fabric.load(place, {"model": model, "optimizer": optimizer})
    fabric.backward(model.train_batch((x, x)))
    optimizer.step()


class Manual(Trained):
    def __init__(self) -> None:
        super().__init__(2)
        self.automatic_optimization = False


class Beside(Trained):
    def configure_model(self) -> None:
        super().configure_model()
        self.beside = nn.Linear(1, 1)


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ConfigError, ModuleError, DataError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refuse(rank: int, size: int, folder: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def set_up(stage: int = 0, net: Any = None, **changes: Any) -> tuple[Any, Any, Any]:
        fabric = fabric_of(size, stage, **changes)
        net = pipe(2) if net is None else net() if callable(net) and not isinstance(net, nn.Module) else net
        return fabric, *fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))

    found["stage"] = refusal(lambda: set_up(2, offload_optimizer=True))
    found["axes"] = refusal(lambda: set_up(net=lambda: pipe(None, topology=three_axes())))
    found["two"] = refusal(lambda: set_up(net=lambda: nn.ModuleList([pipe(2), pipe(2)])))
    found["micro_batches"] = refusal(lambda: DeepSpeedStrategy(micro_batches=0))
    found["manual"] = refusal(
        lambda: fit(DeepSpeedStrategy(stage=0), size, 2, 1, module=Manual(), gradient_clip_val=None)
    )
    found["beside"] = refusal(lambda: fit(DeepSpeedStrategy(stage=0), size, 2, 1, module=Beside(2)))
    fabric, model, optimizer = set_up()
    found["called"] = refusal(lambda: model(batch(1)[0]))
    found["pair"] = refusal(lambda: model.train_batch(batch(1)[0]))
    found["sizes"] = refusal(lambda: model.train_batch((batch(1)[0], batch(1, size=4)[1])))
    found["end"] = refusal(lambda: model.train_batch(iter([batch(1)])))
    found["shapes"] = refusal(lambda: model.train_batch(iter([batch(1), batch(1, size=4)])))
    found["no pass"] = refusal(lambda: fabric.backward(torch.ones((), requires_grad=True)))
    loss = model.train_batch(batch(1))
    found["twice"] = refusal(lambda: model.train_batch(batch(1)))
    found["no backward"] = refusal(optimizer.step)
    fabric.backward(loss)
    optimizer.step()
    fabric.save(f"{folder}/one.ckpt", {"model": model, "optimizer": optimizer})
    alone = pipe(2)
    fabric.setup(alone)
    found["no optimizer"] = refusal(lambda: alone.train_batch(batch(1)))
    _, other, steps = set_up(net=lambda: pipe(2, layers=[*layers(), nn.Linear(3, 3)]))
    found["names"] = refusal(lambda: fabric.load(f"{folder}/one.ckpt", {"model": other}))
    found["groups"] = refusal(lambda: fabric.load(f"{folder}/one.ckpt", {"optimizer": steps}))

    def unequal_groups() -> None:
        net = pipe(2)
        biases = [one for name, one in net.named_parameters() if name == "0.bias"]
        rest = [one for name, one in net.named_parameters() if name != "0.bias"]
        fabric.setup(net, torch.optim.SGD([{"params": rest}, {"params": biases, "lr": 0.2}], lr=0.1))

    found["unequal"] = refusal(unequal_groups)
    for stage in (0, 1):
        check_tied(fabric_of(size, stage), rank, folder)
    return found


def three_axes() -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)


def test_what_cannot_work_is_refused_on_every_rank_and_tied_layers_count_once(tmp_path: Path) -> None:
    first, second = run_ranks(refuse, 2, str(tmp_path), connect=False, timeout_s=60)
    texts = {
        "stage": "ConfigError: DeepSpeedStrategy cannot run PipelineModule: ZeRO stage 2 with a PipelineModule; "
        "offload_optimizer with a PipelineModule.",
        "axes": "ConfigError: DeepSpeedStrategy cannot run PipelineModule: a PipelineModule with the axes ['model']",
        "two": "ModuleError: Expected one PipelineModule in ModuleList, got 2 (0, 1)",
        "micro_batches": "ConfigError: DeepSpeedStrategy: expected micro_batches to be at least 1, got 0",
        "manual": "ConfigError: DeepSpeedStrategy cannot run Manual: manual optimization",
        "beside": "ConfigError: DeepSpeedStrategy cannot run Beside: trained parameters outside the "
        "PipelineModule (beside.weight, beside.bias)",
        "called": "ModuleError: A PipelineModule cannot be called with gradients",
        "pair": "ModuleError: Expected a pair of inputs and labels for a PipelineModule, got a Tensor",
        "sizes": "DataError: Expected the same number of samples in all tensors of a batch for a PipelineModule, "
        "got [4, 8]",
        "end": "DataError: Expected 2 micro-batches for a batch of the pipeline, got 1 from the iterator",
        "shapes": "DataError: Expected micro-batches of one shape",
        "no pass": "ModuleError: Expected the loss that train_batch returned for backward",
        "twice": "ModuleError: Expected backward with the last loss of train_batch before train_batch",
        "no backward": "ModuleError: Expected backward with the last loss of train_batch before step",
        "no optimizer": "ConfigError: train_batch was called before DeepSpeed had an optimizer",
        "names": "CheckpointError: Expected a checkpoint that matches the PipelineModule, got missing names "
        "['6.weight', '6.bias'] and unexpected names []",
        "groups": "CheckpointError: Expected a state of SGD with parameter groups of the sizes [12], got [10]",
        "unequal": "ModuleError: Expected parameters of each parameter group in each pipeline stage",
    }
    for found in (first, second):
        assert sorted(found) == sorted(texts)
        for name, text in texts.items():
            assert text in found[name], name


def specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    twice = LayerSpec(nn.Linear, 8, 8)
    ends = [TiedLayerSpec("ends", nn.Linear, 8, 8) for _ in range(2)]
    return [
        ends[0],
        twice,
        nn.Tanh(),
        LayerSpec(nn.Linear, 8, 8),
        twice,
        torch.tanh,
        ends[1],
        LayerSpec(nn.Linear, 8, 3),
    ]


def build_specs(rank: int, size: int, methods: list[str]) -> list[Any]:
    fabric = fabric_of(size, 0)
    built = []
    for method in methods:
        torch.manual_seed(5)
        with fabric.init_module():
            made = pipe(size, layers=specs(), partition_method=method)
        built.append((made.state_dict(), float(torch.rand(()))))
    return built


def test_layers_have_the_first_values_of_one_process() -> None:
    torch.manual_seed(5)
    wanted: dict[str, Tensor] = {}
    for number, spec in enumerate(specs()):
        if number == 6 or not hasattr(spec, "build"):  # tied to the first, or no layer with parameters
            continue
        prefix = "tied_modules.ends" if number == 0 else str(number)
        wanted.update({f"{prefix}.{name}": value for name, value in spec.build().state_dict().items()})
    drawn = float(torch.rand(()))
    methods = ["uniform", "parameters"]  # the second one builds all layers only to count them
    everywhere = run_ranks(build_specs, 2, methods, connect=False)
    for states in zip(*everywhere, strict=True):
        assert {name for state, _ in states for name in state} == wanted.keys()
        for state, later in states:
            assert later == drawn
            for name, value in state.items():
                assert torch.equal(value, wanted[name]), name
