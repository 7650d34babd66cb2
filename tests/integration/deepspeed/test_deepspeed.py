"""DeepSpeed's engine on two processes: whole runs of the Trainer, checkpoints from and to others, and refusals."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import Net, global_batch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks.summary.summary import summarize
from loopwright.errors import CheckpointError, ConfigError, DataError, ModuleError
from loopwright.strategies import DeepSpeedStrategy

# No parameter is so small that it stays whole.
PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


class Trained(lw.Module):
    """A net that is built in configure_model, whose losses are sums, with a frozen layer and a buffer."""

    def __init__(self, has_optimizer: bool = True, kind: str = "adam") -> None:
        super().__init__()
        self.net: Net | None = None
        self.has_optimizer = has_optimizer
        self.kind = kind
        self.norms: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net is not None
        x, y = batch
        self.steps += 1
        with gathered([self.net.head.weight]):
            assert self.net.head.weight.shape == (3, 8)
        error = self.net(x) + 0.1 * self.frozen(y) - y
        return lw.Loss(error.square().sum(), weight=y.numel())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.net is not None
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)
        # Some of no module that the step runs, and one that the engine is about to gather itself.
        with gathered([*self.frozen.parameters(), self.net.head.weight]):
            sizes = [one.abs().sum() for one in [*self.frozen.parameters(), self.net.head.weight]]
            self.log("size", torch.stack(sizes).sum(), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = getattr(self.trainer.strategy, "global_grad_norm", None)
        if norm is not None:
            self.norms.append(float(norm))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        if not self.has_optimizer:
            return None
        trained = [one for one in self.parameters() if one.requires_grad]
        if self.kind == "sgd":
            return torch.optim.SGD(trained, lr=0.1)
        return torch.optim.AdamW(trained, lr=0.02, eps=1e-2)


def gathered(weights: list[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which weights are whole, as a user writes it for stage 3."""
    if not hasattr(weights[0], "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(weights)
    return context


def data() -> TensorDataset:
    return TensorDataset(*map(torch.cat, zip(*[global_batch(number) for number in range(5)], strict=True)))


def fit(
    strategy: Any, size: int, steps: int, *, ckpt_path: str | None = None, clip: float | None = 0.3, **changes: Any
) -> tuple[lw.Trainer, Any]:
    """Train: five batches in an epoch and windows of two, so that the last one is short."""
    module = changes.pop("module", None) or Trained()
    arguments = {
        "accelerator": "cpu", "strategy": strategy, "devices": size, "max_steps": steps, "logger": False,
        "accumulate_grad_batches": 2, "gradient_clip_val": clip, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, **changes,
    }  # fmt: skip
    trainer = lw.Trainer(**arguments)
    trainer.fit(module, *[DataLoader(data(), batch_size=12 // size) for _ in range(2)], ckpt_path=ckpt_path)
    return trainer, module


def engine(stage: int) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(config=PARTITIONED) if stage == 3 else DeepSpeedStrategy(stage=stage)


def weights(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


# --- runs ----------------------------------------------------------------------------------------------------------


def train_and_hand_over(rank: int, size: int, folder: str, precision: str) -> list[Any]:
    """Train with every stage, and resume in others: what each leaves is a file."""
    results = []
    for stage in (1, 2, 3):
        trainer, module = fit(engine(stage), size, 3, precision=precision)
        trainer.save_checkpoint(f"{folder}/{stage}.ckpt")
        shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
        results.append((shapes["net.first.weight"], module.norms, float(trainer.callback_metrics["val"])))
        for other in (stage, 4 - stage):
            trainer, _ = fit(engine(other), size, 6, ckpt_path=f"{folder}/{stage}.ckpt", precision=precision)
            trainer.save_checkpoint(f"{folder}/{stage}-{other}.ckpt")
        trainer, _ = fit(engine(stage), size, 6, precision=precision)
        trainer.save_checkpoint(f"{folder}/{stage}-whole.ckpt")
    if precision == "32-true":
        for stage, name in ((1, "ddp"), (3, "fsdp")):
            fit_to(f"{folder}/to-{name}.ckpt", name, size, f"{folder}/{stage}.ckpt")
            fit_to(f"{folder}/from-single-{stage}.ckpt", engine(stage), size, f"{folder}/single.ckpt")
            trainer, _ = fit(name, size, 3)
            trainer.save_checkpoint(f"{folder}/{name}.ckpt")
            fit_to(f"{folder}/from-{name}.ckpt", engine(stage), size, f"{folder}/{name}.ckpt")
    return results


def fit_to(path: str, strategy: Any, size: int, ckpt_path: str) -> None:
    trainer, _ = fit(strategy, size, 6, ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def train_alone(rank: int, size: int, folder: str) -> None:
    """Train without DeepSpeed; in a process of its own, for one that has trained cannot be forked."""
    for steps, name in ((3, "single"), (6, "wanted")):
        trainer, _ = fit("single_device", 1, steps)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")


def fit_to_one(rank: int, size: int, folder: str) -> None:
    fit_to(f"{folder}/to-single.ckpt", "single_device", 1, f"{folder}/3.ckpt")


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_runs_are_those_of_one_process_and_checkpoints_load_everywhere(precision: str, tmp_path: Path) -> None:
    run_ranks(train_alone, 1, str(tmp_path), connect=False)
    results = run_ranks(train_and_hand_over, 2, str(tmp_path), precision, connect=False, timeout_s=40)
    for (shape1, norms, loss), shape in zip(results[0], ((8, 6), (8, 6), (0,)), strict=True):
        assert shape1 == shape  # in stage 3 a rank has its part only
        assert len(norms) == 4  # at each micro-batch after the first window, the norm of the last step
        assert loss > 0
    for stage in (1, 2, 3):
        whole = torch.load(tmp_path / f"{stage}-whole.ckpt", weights_only=True)
        again = torch.load(tmp_path / f"{stage}-{stage}.ckpt", weights_only=True)
        assert distance(whole["state_dict"], again["state_dict"]) == 0
        moments = [one["optimizer_states"][0]["state"] for one in (whole, again)]
        assert len(moments[0]) == 8
        for number, entry in moments[0].items():
            assert entry["step"] == 6
            assert all(torch.equal(entry[key], moments[1][number][key]) for key in entry)
        # A buffer that is made within DeepSpeed's context of stage 3 has 16 bits; parameters have masters.
        parameters = {name: one for name, one in whole["state_dict"].items() if name != "steps"}
        assert {one.dtype for one in parameters.values()} == {torch.float32}
    if precision == "32-true":
        wanted = weights(tmp_path / "wanted.ckpt")
        names = ["1-whole", "2-whole", "3-whole", "1-3", "3-1", "to-ddp", "to-fsdp", "from-single-1", "from-single-3"]
        found = {
            name: distance(weights(tmp_path / f"{name}.ckpt"), wanted) for name in [*names, "from-ddp", "from-fsdp"]
        }
        # `steps` counts micro-batches of a rank, the same everywhere; the rest differs by the order of additions.
        assert {name: value for name, value in found.items() if value > 1e-6} == {}
        run_ranks(fit_to_one, 1, str(tmp_path), connect=False)
        assert distance(weights(tmp_path / "to-single.ckpt"), wanted) < 1e-6
    else:
        # Parameters of stages 1 and 2 begin as in stage 2, bit for bit: only masters are cut differently.
        assert distance(weights(tmp_path / "1-whole.ckpt"), weights(tmp_path / "2-whole.ckpt")) < 1e-2


# --- the configuration's own optimizer and schedule ----------------------------------------------------------------

OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.999], "eps": 1e-2, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 8},
    },
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}


def train_by_file(rank: int, size: int, folder: str) -> Any:
    file = f"{folder}/ds.json"
    trainer, module = fit(DeepSpeedStrategy(config=file), size, 6, module=Trained(has_optimizer=False))
    trainer.save_checkpoint(f"{folder}/6.ckpt")
    trainer, _ = fit(DeepSpeedStrategy(config=file), size, 3, module=Trained(has_optimizer=False))
    trainer.save_checkpoint(f"{folder}/3.ckpt")
    trainer, again = fit(
        DeepSpeedStrategy(config=file), size, 6, module=Trained(has_optimizer=False), ckpt_path=f"{folder}/3.ckpt"
    )
    trainer.save_checkpoint(f"{folder}/3-6.ckpt")
    written = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.2, "zero_optimization": {"stage": 1}}
    winner, _ = fit(DeepSpeedStrategy(config=written, config_wins=True), size, 4)
    winner.save_checkpoint(f"{folder}/config.ckpt")
    trainer, _ = fit(DeepSpeedStrategy(stage=1), size, 4, accumulate_grad_batches=3, clip=0.2)
    trainer.save_checkpoint(f"{folder}/arguments.ckpt")
    assert (winner.accumulate_grad_batches, winner.gradient_clip_val) == (3, 0.2)
    return module.rates, again.rates, by_hand(size, rank)


def by_hand(size: int, rank: int) -> Any:
    """Let DeepSpeed's own engine make the schedule (its Adam would be built), and return the rate after each step."""
    import deepspeed

    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    config = {**OPTIMIZER, "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 0.1, "steps_per_print": 10**9}
    del config["optimizer"]
    config["zero_allow_untested_optimizer"] = True
    made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    rates = []
    for number in range(6):
        x, y = (one.chunk(size)[rank] for one in global_batch(number % 5))
        made.backward(nn.functional.mse_loss(made(x), y))
        made.step()
        rates.append(made.get_lr()[0])
    return rates


def test_optimizer_and_schedule_of_the_file_work_as_the_engine_does_them(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(OPTIMIZER))
    rates, again, wanted = run_ranks(train_by_file, 2, str(tmp_path), connect=False, timeout_s=40)[0]
    ends = [1, 3, 4, 6, 8, 9]  # windows of 2, 2 and 1 micro-batches in an epoch; the hook sees the rate after its step
    assert [rates[index] for index in ends] == pytest.approx(wanted)
    assert again == rates[5:]
    assert distance(weights(tmp_path / "6.ckpt"), weights(tmp_path / "3-6.ckpt")) == 0
    # A configuration that takes precedence trains what the same arguments of the Trainer train.
    assert distance(weights(tmp_path / "config.ckpt"), weights(tmp_path / "arguments.ckpt")) == 0


# --- manual optimization -------------------------------------------------------------------------------------------


class ByHand(lw.Module):
    """Steps its optimizer itself, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(3))  # of no submodule
        self.way = way

    def loss_of(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]) * self.scale, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if self.way == "each":
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()
            return None
        if self.way == "accumulated":
            self.manual_backward(self.loss_of(batch) / 2)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            return {"anything": "else"}
        # One or two steps in a batch, and gradients that are dropped before.
        for _ in range(1 + batch_idx % 2):
            self.manual_backward(self.loss_of(batch))
            optimizer.zero_grad()
            for part in (0.25, 0.75):
                self.manual_backward(part * self.loss_of(batch))
            optimizer.step()
            optimizer.zero_grad()
        return {"anything": 1.5}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss_of(batch), sync_dist=True)
        return "anything"

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2)


WAYS = ("each", "accumulated", "varying")


def step_by_hand(rank: int, size: int, cases: list[tuple[int | None, str]], folder: str) -> list[tuple[float, int]]:
    found = []
    for stage, way in cases:
        strategy = "single_device" if stage is None else engine(stage)
        trainer, _ = fit(strategy, size, -1, max_epochs=2, clip=None, accumulate_grad_batches=1, module=ByHand(way))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.save_checkpoint(f"{folder}/{stage}-{way}.ckpt")
        found.append((float(trainer.callback_metrics["val"]), len(said)))
    return found


def test_manual_steps_are_those_of_one_process(tmp_path: Path) -> None:
    wanted = dict(
        zip(
            WAYS,
            run_ranks(step_by_hand, 1, [(None, way) for way in WAYS], str(tmp_path), connect=False)[0],
            strict=True,
        )
    )
    cases = [(1, "accumulated"), (2, "varying"), (3, "each"), (3, "varying")]
    results = run_ranks(step_by_hand, 2, cases, str(tmp_path), connect=False)
    for rank, found in enumerate(results):
        assert [loss for loss, _ in found] == pytest.approx([wanted[way][0] for _, way in cases], rel=1e-6)
        # The last batch of five did not step: that its gradients are not saved is said once.
        assert [count for _, count in found] == [int(rank == 0), 0, 0, 0]
    for stage, way in cases:
        one, other = (weights(tmp_path / f"{name}-{way}.ckpt") for name in (stage, None))
        assert distance(one, other) < 1e-6, (stage, way)  # the order of additions


# --- evaluation ----------------------------------------------------------------------------------------------------


class Plain(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net is not None
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def evaluate_unevenly(rank: int, size: int, is_sharded: bool, folder: str) -> list[float]:
    """Train, evaluate 3 batches of 20 samples and 5 of 12, and train on."""
    strategy = engine(3) if is_sharded else "single_device"
    trainer, module = fit(strategy, size, 3)
    found = [float(trainer.callback_metrics["val"])]
    for batch_size in (20, 12):
        loader = DataLoader(data(), batch_size=batch_size)
        found += trainer.validate(module, loader, verbose=False)[0].values()
    trainer.save_checkpoint(f"{folder}/{size}.ckpt")
    trainer, _ = fit(engine(3) if is_sharded else "single_device", size, 3, module=module)
    found.append(float(trainer.callback_metrics["val"]))
    found += trainer.validate(module, loader, ckpt_path=f"{folder}/{size}.ckpt", verbose=False)[0].values()
    found.append(summarize(module).total_parameters)
    # In stage 0, a window of one micro-batch among windows of two: the engine's own number of them is two.
    trainer, _ = fit(engine(0) if is_sharded else "single_device", size, 3, clip=None, module=Plain(kind="sgd"))
    return [*found, float(trainer.callback_metrics["val"])]


def test_ranks_evaluate_unequally_many_batches_in_stage_3(tmp_path: Path) -> None:
    wanted = run_ranks(evaluate_unevenly, 1, False, str(tmp_path), connect=False)[0]
    for found in run_ranks(evaluate_unevenly, 2, True, str(tmp_path), connect=False):
        assert found == pytest.approx(wanted, rel=1e-6)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_a_process_starts() -> None:
    def refused(what: str, **changes: Any) -> None:
        strategy = changes.pop("strategy", None) or DeepSpeedStrategy()
        with pytest.raises(ConfigError, match=what):
            fit(strategy, 2, 1, **changes)

    refused(r"gradient_clipping +1\.0 +0\.5", strategy=DeepSpeedStrategy(config={"gradient_clipping": 1.0}), clip=0.5)
    refused(r"gradient_accumulation_steps +4 +2", strategy=DeepSpeedStrategy(config={"gradient_accumulation_steps": 4}))
    refused(
        r"train_micro_batch_size_per_gpu +8 +6",
        strategy=DeepSpeedStrategy(config={"train_micro_batch_size_per_gpu": 8}),
    )
    refused("float32 master weights", precision="64-true")
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    if not (asked and asked()):
        refused("Expected a device with float16", precision="16-mixed")
    with pytest.raises(ConfigError, match="without partition_activations"):
        DeepSpeedStrategy(contiguous_memory_optimization=True)
    with pytest.raises(ConfigError, match="number_checkpoints"):
        DeepSpeedStrategy(contiguous_memory_optimization=True, partition_activations=True)


def refuse_on_ranks(rank: int, size: int, folder: str) -> dict[str, str]:
    import deepspeed

    said: dict[str, str] = {}

    def refused(name: str, kind: type[Exception], function: Any) -> None:
        try:
            function()
        except kind as error:
            said[name] = str(error)

    fabric = lw.Fabric(accelerator="cpu", strategy=DeepSpeedStrategy(config=PARTITIONED), devices=size)
    fabric.launch()
    model, other = Net(), Net()
    unknown = {"zero_optimization": {"stage": 2, "buckets": 5}, "optimizer": {"type": "Adam"}}
    wrong_fabric = lw.Fabric(accelerator="cpu", strategy=DeepSpeedStrategy(config=unknown), devices=size)
    wrong_fabric.launch()
    with warnings.catch_warnings(record=True) as said_of_sections:
        warnings.simplefilter("always")
        sgd = torch.optim.SGD(other.parameters(), lr=0.1)
        refused("unknown", ConfigError, lambda: wrong_fabric.setup(other, sgd))
    said["sections"] = str([str(one.message) for one in said_of_sections])
    several = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.head)]
    refused("several", ConfigError, lambda: fabric.setup(model, *several))
    alone = fabric.setup_module(Net())
    loss = alone(torch.randn(2, 6)).sum()
    refused("early", ConfigError, lambda: fabric.backward(loss))
    refused("lbfgs", ConfigError, lambda: fabric.setup(other, torch.optim.LBFGS(other.parameters())))
    refused("stranger", ConfigError, lambda: fabric.setup_optimizers(torch.optim.SGD(Net().parameters(), lr=0.1)))
    net = Net()
    running, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    refused("again", ConfigError, lambda: fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1)))
    assert net.head.weight.numel() == 0
    with deepspeed.zero.GatheredParameters([net.head.weight]):
        assert torch.equal(net.head.weight, Net().head.weight)
    fabric.backward(running(torch.randn(2, 6)).sum())
    optimizer.zero_grad()  # forgets what the engine has accumulated
    loss = running(torch.zeros(2, 6)).sum() * 0
    refused("retain", ConfigError, lambda: fabric.backward(loss, retain_graph=True))
    fabric.backward(loss)
    norm = fabric.clip_gradients(running, optimizer, max_norm=1.0)
    said["norm"] = str(float(norm))
    optimizer.step()
    fabric.save(f"{folder}/f.ckpt", {"model": running, "optimizer": optimizer})
    wrong = {**torch.load(f"{folder}/f.ckpt", weights_only=True)["model"], "head.weight": torch.zeros(4, 8)}
    refused("shape", CheckpointError, lambda: fabric.strategy.load_module_state_dict(running._without_fabric, wrong))
    odd = DataLoader(TensorDataset(torch.zeros(1, 6), torch.zeros(1, 3)), batch_size=1)
    with torch.no_grad():
        refused("uneven loader", DataError, lambda: next(iter(fabric.setup_dataloaders(odd))))
    trainer = lw.Trainer(accelerator="cpu", strategy=engine(3), devices=size, logger=False, enable_progress_bar=False)
    refused("uneven", DataError, lambda: trainer.validate(Validated(), odd, verbose=False))
    refused("none", ModuleError, lambda: fit(DeepSpeedStrategy(stage=1), size, 1, module=Skipping()))
    refused("joint", ConfigError, lambda: fit(DeepSpeedStrategy(stage=1), size, 1, module=Joint()))
    return said


class Validated(Trained):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class Joint(Trained):
    def configure_optimizers(self) -> Any:
        head, first = self.net.head.parameters(), self.net.first.parameters()
        return [torch.optim.SGD(head, lr=0.1), torch.optim.AdamW(first, lr=0.1)]


class Skipping(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


def test_what_an_engine_cannot_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    said = run_ranks(refuse_on_ranks, 2, str(tmp_path), connect=False, timeout_s=40)[0]
    assert "Expected one optimizer for a module with DeepSpeedStrategy, got 2" in said["several"]
    assert "DeepSpeed rejects these keys" in said["unknown"]
    assert "buckets: Extra inputs are not permitted" in said["unknown"]
    assert said["sections"].count("optimizer ignored, because") == 1
    assert "before DeepSpeed had an optimizer" in said["early"]
    assert "LBFGS cannot be used" in said["lbfgs"]
    assert "Expected an optimizer with parameters of a module that is set up" in said["stranger"]
    assert "Expected one optimizer" in said["again"]
    assert float(said["norm"]) == 0
    assert "head.weight of shape (3, 8) in the checkpoint, as in the module, got (4, 8)" in said["shape"]
    assert "from training_step, which DeepSpeed needs on every rank, got None" in said["none"]
    assert "at least one batch for each of 2 processes" in said["uneven loader"]
    assert "Expected one optimizer with DeepSpeedStrategy, whose engine steps, got SGD, AdamW" in said["joint"]
    assert "1 of 2 ranks have a batch in a global batch" in said["uneven"]
    assert "Expected backward without retain_graph" in said["retain"]
    saved = torch.load(tmp_path / "f.ckpt", weights_only=True)
    assert torch.equal(saved["model"]["head.weight"], Net().head.weight)
