"""Modules that are changed after they were set up, and data in another order by rank: right, or a named error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset, random_split

import loopwright as lw
from loopwright.strategies import DDPStrategy, FSDPStrategy, MeshStrategy

# Any in this file: strategies, batches, and results that travel between processes.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer(x).tanh()
        return x if self.extra is None else x + self.extra(x)


class Net(lw.Module):
    """Changed once, in a hook, by `change(net, optimizer)`."""

    def __init__(self, change: Callable[[Net, Any], None], hook: str = "on_train_batch_start") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.late: nn.Module | None = None
        self.scale: nn.Parameter | None = None
        self.hidden: list[nn.Module] = []
        self.head = nn.Linear(4, 1)
        self.change, self.hook = change, hook

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if isinstance(batch, list) else batch
        for layer in [*self.blocks, self.frozen, *([self.late] if self.late else []), *self.hidden]:
            x = layer(x)
        loss = (self.head(x if self.scale is None else x * self.scale) - 1).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_start" and self.global_step == 2:
            self._change()

    def on_train_epoch_start(self) -> None:
        if self.hook == "on_train_epoch_start" and self.current_epoch == 1:
            self._change()

    def _change(self) -> None:
        torch.manual_seed(1 + self.trainer.global_rank)  # ranks draw other values: rank 0's are taken
        optimizer: Any = self.optimizers()
        self.change(self, getattr(optimizer, "optimizer", optimizer))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def add(optimizer: Any, *parameters: nn.Parameter) -> None:
    optimizer.add_param_group({"params": list(parameters), "lr": 0.05})


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes, dtype=torch.float64)


class Shift(nn.Module):
    """A buffer that each rank draws, and that must be rank 0's."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def add_layer(net: Net, optimizer: Any) -> None:
    net.late = linear(4, 4)
    add(optimizer, *net.late.parameters())


def add_inner_layer(net: Net, optimizer: Any) -> None:
    net.blocks[0].extra = nn.Sequential(linear(4, 4), Shift())
    add(optimizer, *net.blocks[0].extra.parameters())


def add_weight(net: Net, optimizer: Any) -> None:
    net.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))
    add(optimizer, net.scale)


def replace_layer(net: Net, optimizer: Any) -> None:
    net.head = linear(4, 1)
    add(optimizer, *net.head.parameters())


def remove_layer(net: Net, optimizer: Any) -> None:
    net.blocks[1] = nn.Identity()


def train_more(net: Net, optimizer: Any) -> None:
    add(optimizer, *net.frozen.requires_grad_(True).parameters())


def train_less(net: Net, optimizer: Any) -> None:
    net.blocks[0].requires_grad_(False)


ADOPTED = [add_layer, add_inner_layer, add_weight, replace_layer, remove_layer, train_more, train_less]


def strategy_of(name: str) -> Any:
    units: dict[str, Any] = {"auto_wrap_policy": {Block}}
    return {
        "one": lambda: "auto",
        "ddp": lambda: DDPStrategy(stall_timeout=2),
        "fsdp": lambda: FSDPStrategy(stall_timeout=2),
        "fsdp of units": lambda: FSDPStrategy(stall_timeout=2, **units),
        "mesh": lambda: MeshStrategy(dp=2, fsdp=1, stall_timeout=2, **units),
        "tp": lambda: MeshStrategy(tp=2, fsdp=1, tensor_plan={"frozen": "colwise_gather_output"}, stall_timeout=2),
        "deepspeed": lambda: "deepspeed_stage_1",
    }[name]()


def trainer_of(name: str, epochs: int = 2) -> lw.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    more = {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": epochs}
    more["precision"] = "32-true" if name == "deepspeed" else "64-true"
    return lw.Trainer(strategy=strategy_of(name), devices=1 if name == "one" else 2, **quiet, **more)  # type: ignore[arg-type]


def batches(name: str) -> Any:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = x.float() if name == "deepspeed" else x
    return DataLoader(TensorDataset(x), batch_size=8 if name in ("one", "tp") else 4)


def weights(net: Net) -> dict[str, Tensor]:
    with torch.no_grad():
        values: dict[str, Any] = dict(net.named_parameters())
        return {name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in values.items()}


def train(name: str, change: Callable[[Net, Any], None], **options: Any) -> dict[str, Tensor]:
    net = Net(change, options.get("hook", "on_train_batch_start"))
    net.automatic_optimization = not options.get("is_manual")
    trainer = trainer_of(name)
    trainer.fit(net, batches(name))
    return weights(net)


def train_all(rank: int, size: int, name: str) -> dict[str, Any]:
    results: dict[str, Any] = {change.__name__: train(name, change) for change in ADOPTED}
    results["at the epoch"] = train(name, add_layer, hook="on_train_epoch_start")
    results["manual"] = train(name, add_layer, is_manual=True)
    net = Net(lambda net, optimizer: None)
    trainer_of(name, 1).fit(net, batches(name))
    torch.manual_seed(1 + rank)
    net.late = linear(4, 4)
    trainer_of(name, 1).fit(net, batches(name))
    results["between fits"] = weights(net)
    return results


@pytest.fixture(scope="module")
def expected() -> Any:
    return run_ranks(train_all, 1, "one", connect=False)[0]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp of units", "mesh"])
def test_what_is_changed_in_a_hook_is_trained_as_on_one_process(name: str, expected: Any) -> None:
    first, second = run_ranks(train_all, 2, name, connect=False, timeout_s=120)
    for case, wanted in expected.items():
        assert wanted.keys() == first[case].keys(), case
        for key, value in wanted.items():
            assert torch.equal(first[case][key], second[case][key]), (case, key)
            # Only the order of additions over samples differs.
            torch.testing.assert_close(first[case][key], value, rtol=1e-9, atol=1e-12, msg=f"{case}: {key}")


# --- refused ---------------------------------------------------------------------------------------------------------


def hide_layer(net: Net, optimizer: Any) -> None:
    net.hidden.append(linear(4, 4))
    add(optimizer, *net.hidden[0].parameters())


def replace_weight(net: Net, optimizer: Any) -> None:
    net.blocks[0].layer.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def assign_data(net: Net, optimizer: Any) -> None:
    net.blocks[0].layer.weight.data = torch.randn(4, 4, dtype=torch.float64)


def assign_vector(net: Net, optimizer: Any) -> None:
    numbers = torch.zeros(sum(one.numel() for one in net.parameters()), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(numbers, net.parameters())


def add_on_rank_0(net: Net, optimizer: Any) -> None:
    if net.trainer.global_rank == 0:
        add_layer(net, optimizer)


def add_another_shape(net: Net, optimizer: Any) -> None:
    net.late = nn.Sequential(linear(4, 4), linear(4, 4 + net.trainer.global_rank))


def refused(
    rank: int, size: int, name: str, change: Callable[[Net, Any], None], hook: str = "on_train_batch_start"
) -> str:
    try:
        train(name, change, hook=hook)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ddp", hide_layer, "got others on rank 0: parameter 0 of group 1 (4, 4); parameter 1"),
        ("fsdp", hide_layer, "got others on rank 0: parameter 0 of group 1 (4, 4); parameter 1"),
        ("fsdp of units", replace_weight, "rank 0, got other parameters in place of blocks.0.layer.weight"),
        ("fsdp", assign_data, "rank 0, got other data in blocks.0.layer.weight"),
        ("mesh", assign_vector, "got other data in frozen.weight, frozen.bias"),
        ("ddp", add_on_rank_0, "on rank 0 after it was set up (parameters late.weight, late.bias), but not on rank 1"),
        ("fsdp", add_on_rank_0, "on rank 0 after it was set up (late.weight, late.bias), but not on rank 1"),
        ("ddp", add_another_shape, "rank 0: late.1.weight: (4, 4)"),
        ("fsdp", add_another_shape, "rank 0: late.1.weight: (4, 4)"),
        ("tp", add_layer, "as they were split over tp=2, got new ones on rank 0: late.weight, late.bias"),
        pytest.param(
            "deepspeed",
            add_layer,
            "its DeepSpeed engine was made, got new ones on rank 0: late.weight, late.bias",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:12],
)
def test_what_cannot_be_adopted_is_an_error_within_the_step(
    name: str, change: Callable[[Net, Any], None], message: str
) -> None:
    if name == "deepspeed":
        import_deepspeed()
    first, _ = run_ranks(refused, 2, name, change, connect=False)
    assert message in first
    assert "ModuleError" in first


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_layer_that_one_rank_adds_at_an_epoch_is_named(name: str) -> None:
    for message in run_ranks(refused, 2, name, add_on_rank_0, "on_train_epoch_start", connect=False):
        assert "parameter late.weight: trained on rank 0; missing on rank 1" in message


# --- data ------------------------------------------------------------------------------------------------------------


class Files(Dataset[Tensor]):
    """Samples with random augmentation."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(1, 4, dtype=torch.float64)


NAMES = [f"{number}.png" for number in range(200)]
NUMBERS = torch.arange(800.0).view(200, 4)


def shuffled(values: list[Any], rank: int) -> list[Any]:
    return random.Random(rank).sample(values, len(values))


OTHER_ORDER: dict[str, Callable[[int], Any]] = {
    "files": lambda rank: Files(shuffled(NAMES, rank)),
    "datasets[1].files": lambda rank: ConcatDataset([Files(NAMES), Files(shuffled(NAMES, rank))]),
    "indices": lambda rank: random_split(Files(NAMES), [100, 100], generator=torch.Generator().manual_seed(rank))[0],
    "tensors[0]": lambda rank: TensorDataset(NUMBERS[shuffled(list(range(200)), rank)]),
    "dataset.files ": lambda rank: random_split(Files(shuffled(NAMES, rank)), [0.5, 0.5], torch.Generator())[0],
    "files ": lambda rank: Files(NUMBERS.numpy()[shuffled(list(range(200)), rank)]),
}
NO_OTHER_ORDER: dict[str, Callable[[int], Any]] = {
    "the same": lambda rank: Files(NAMES),
    "paths of the rank": lambda rank: Files([f"/rank-{rank}/{name}" for name in NAMES]),
    "drawn by the rank": lambda rank: TensorDataset(torch.randn(200, 4, generator=torch.Generator().manual_seed(rank))),
    "objects": lambda rank: Files([object() for _ in NAMES]),
}


def read(rank: int, size: int, make: Callable[[int], Any], stage: str) -> str:
    net = Net(lambda net, optimizer: None)
    net.validation_step = lambda batch, batch_idx: None  # type: ignore[assignment,method-assign]
    loaders = [DataLoader(make(rank) if one == stage else Files(NAMES), batch_size=4) for one in ("train", "val")]
    trainer = lw.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", logger=False, enable_checkpointing=False, fast_dev_run=True,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    try:
        trainer.fit(net, *loaders)
    except lw.errors.DataError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize(("path", "stage"), [*((path, "train") for path in OTHER_ORDER), ("files", "val")])
def test_another_order_of_samples_on_a_rank_is_an_error(path: str, stage: str) -> None:
    for message in run_ranks(read, 2, OTHER_ORDER[path], stage, connect=False):
        assert f"Expected the samples of dataset.{path.strip()} in the same order on all ranks" in message
        assert "another order on rank 1 than on rank 0" in message


@pytest.mark.parametrize("case", NO_OTHER_ORDER)
def test_other_samples_and_random_augmentation_are_no_error(case: str) -> None:
    assert run_ranks(read, 2, NO_OTHER_ORDER[case], "train", connect=False) == ["read", "read"]
