"""`Trainer(reproducible="world")`: the same bits on 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset
from toys import RecordingLogger, quiet

import loopwright as lw
from loopwright.data import ShardedIterable
from loopwright.errors import ConfigError, DataError, LoopwrightError
from loopwright.strategies import DDPStrategy
from loopwright.strategies.distributed.tree_sum import TreeSum, sum_scattered, tree_norm
from loopwright.trainer.reproducible_world.metrics import exact_sums

SHARDS = 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of different lengths, with augmentation from the global generators; the last batch is smaller."""

    def __init__(self, *, augments: bool = True) -> None:
        self.augments = augments

    def __len__(self) -> int:
        return 2 * 21 - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 13, (6,), generator=generator)
        tokens[1 + index % 6 :] = 0
        if self.augments and random.random() < 0.5:
            tokens[torch.randint(6, ())] = 5
        return {"tokens": tokens, "target": tokens.roll(1)}


class Transformer(lw.Module):
    def __init__(self, rule: str = "adamw") -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 20, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))  # cannot be sharded
        self.spare = nn.Linear(3, 3)  # no loss reaches it
        self.head = nn.Linear(12, 13)
        self.rule = rule

    def loss(self, batch: dict[str, Tensor]) -> lw.Loss:
        hidden = self.embedding(batch["tokens"]) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        mask = batch["target"] > 0
        losses = nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), batch["target"].flatten(), reduction="none"
        )
        return lw.Loss((losses * mask.flatten()).sum(), mask.sum())

    def training_step(self, batch: dict[str, Tensor], index: int) -> lw.Loss:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("scale", self.scale * batch["tokens"].float().mean())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self.rule == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.rule == "joint":
            vectors = [one for one in self.parameters() if one.ndim < 2]
            return [torch.optim.AdamW([one for one in self.parameters() if one.ndim > 1], lr=0.01),
                    torch.optim.SGD(vectors, lr=0.05, momentum=0.9)]  # fmt: skip
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 33

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 9, 9, generator=generator), torch.tensor(index % 5)


class Convolutions(Transformer):
    def __init__(self, rule: str = "adamw") -> None:
        lw.Module.__init__(self)
        self.rule = rule
        self.net = nn.Sequential(
            nn.Conv2d(3, 10, 3, bias=False), nn.GroupNorm(2, 10), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(10, 6, 3),
            nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:  # type: ignore[override]
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:  # type: ignore[override]
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


class Drawing(Convolutions):
    """Draws in a hook, once for each batch of the rank, and in validations; its weights are not contiguous."""

    def __init__(self, rule: str = "adamw") -> None:
        super().__init__(rule)
        self.to(memory_format=torch.channels_last)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        torch.rand(1)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:  # type: ignore[override]
        images = batch[0] + torch.randn_like(batch[0]) * random.random()
        self.log("val_loss", nn.functional.cross_entropy(self.net(images), batch[1]))


def digest(state: Any) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()[:16]


class Broken(Exception):
    pass


class Breaks(lw.Callback):
    """Ends the fit before the window after `step`, as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: lw.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Broken


def fit(
    size: int,
    *,
    strategy: str = "ddp",
    kind: type[Transformer] = Transformer,
    rule: str = "adamw",
    resume: str | None = None,
    breaks_at: int = -1,
    folder: str | None = None,
    workers: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """Train for two epochs of 2.6 windows; return digests."""
    lw.seed_everything(7)
    data: Any = Sentences() if kind is Transformer else Pictures()
    seen: Any = Sentences(augments=False) if kind is Transformer else data
    logger = RecordingLogger()
    if folder is not None:
        saves = lw.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        arguments |= {"callbacks": [Breaks(breaks_at), saves], "enable_checkpointing": True}
    trainer = quiet(
        strategy="auto" if size == 1 and strategy == "ddp" else strategy, devices=size, reproducible="world",
        micro_shards=SHARDS, logger=[logger], log_every_n_steps=1, max_epochs=2, gradient_clip_val=0.3, **arguments,
    )  # fmt: skip
    module = kind(rule)
    try:
        loader = DataLoader(data, 2, shuffle=True, num_workers=workers)
        trainer.fit(module, loader, DataLoader(seen, 2), ckpt_path=resume)
    except Broken:
        return {"rows": logger.rows}
    with tempfile.TemporaryDirectory() as own:
        trainer.save_checkpoint(f"{own}/end.ckpt")
        saved = torch.load(f"{own}/end.ckpt", weights_only=True) if not trainer.global_rank else {}
    return {
        "steps": trainer.global_step,
        "weights": digest(saved.get("state_dict")),
        "optimizer": digest(saved.get("optimizer_states")),
        "rows": logger.rows,
    }


CASES: dict[str, dict[str, Any]] = {
    "ddp transformer": {},
    "ddp conv sgd": {"kind": Convolutions, "rule": "sgd", "val_check_interval": 0.4},
    "ddp drawing": {"kind": Drawing, "val_check_interval": 0.4},
    "ddp workers": {"workers": 2},
    "ddp joint": {"rule": "joint"},
    "ddp bf16": {"precision": "bf16-mixed"},
    "fsdp transformer": {"strategy": "fsdp"},
    "fsdp conv sgd": {"strategy": "fsdp", "kind": Convolutions, "rule": "sgd"},
    "fsdp joint": {"strategy": "fsdp", "rule": "joint"},
    "fsdp bf16": {"strategy": "fsdp", "precision": "bf16-mixed"},
}


def all_cases(rank: int, size: int) -> dict[str, dict[str, Any]]:
    return {name: fit(size, **arguments) for name, arguments in CASES.items()}


@pytest.mark.slow
def test_weights_states_and_rows_are_equal_on_every_number_of_ranks() -> None:
    alone = run_ranks(all_cases, 1, connect=False)[0]
    for size in (2, 4, 8):
        result = run_ranks(all_cases, size, connect=False)[0]
        for name in CASES:
            assert result[name] == alone[name], f"{name} on {size} ranks"
    for strategy in ("ddp", "fsdp"):  # which may agree with each other
        chosen = [result["weights"] for name, result in alone.items() if name.startswith(strategy)]
        assert len(set(chosen)) == len(chosen)
    assert alone["ddp transformer"]["steps"] == 6  # a step of 5 micro-shards ends each epoch


def compiled(rank: int, size: int) -> dict[str, Any]:
    return fit(size, strategy="fsdp", kind=Convolutions, compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_steps_are_equal_on_one_rank_and_on_two() -> None:
    assert run_ranks(compiled, 2, connect=False)[0] == run_ranks(compiled, 1, connect=False)[0]


def broken_and_resumed(rank: int, size: int, strategy: str, folder: str, step: int, resume: str | None) -> Any:
    return fit(size, strategy=strategy, folder=folder, breaks_at=step, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resumes_within_an_epoch_on_other_numbers_of_ranks_equal_a_run_without(strategy: str, tmp_path: Path) -> None:
    whole = run_ranks(broken_and_resumed, 1, strategy, str(tmp_path / "whole"), -1, None, connect=False)[0]
    rows: list[Any] = []
    result: dict[str, Any] = {}
    # Also before the window that not all of 8 ranks have data for.
    for size, step, begins_at in ((4, 1, None), (2, 2, 1), (8, 4, 2), (1, -1, 4)):
        resume = None if begins_at is None else str(tmp_path / f"step={begins_at}.ckpt")
        result = run_ranks(broken_and_resumed, size, strategy, str(tmp_path), step, resume, connect=False)[0]
        rows += result["rows"]
    assert {**result, "rows": rows} == whole


class Wide(Transformer):
    """Computes in float64, without what is drawn."""

    def __init__(self) -> None:
        super().__init__("sgd")
        for one in self.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0
            if isinstance(one, nn.MultiheadAttention):
                one.dropout = 0.0


def test_the_step_is_that_of_a_handwritten_loop() -> None:
    """In float64 to 1e-12: sums are in another order."""
    data = Sentences(augments=False)
    torch.manual_seed(1)
    module, reference = Wide().double(), Wide().double()
    reference.load_state_dict(module.state_dict())
    trainer = quiet(
        precision="64-true", reproducible="world", micro_shards=4, max_epochs=1, gradient_clip_val=0.3,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 3))
    batches = list(DataLoader(data, 3))
    optimizer = reference.configure_optimizers()
    for first in range(0, len(batches), 4):
        optimizer.zero_grad()
        losses = [reference.loss(batch) for batch in batches[first : first + 4]]
        (sum(one.sum for one in losses) / sum(one.weight for one in losses)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        optimizer.step()
    for own, wanted in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


class Normed(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class Manual(Transformer):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_shards": 6}, "micro_shards=6"),
        ({"micro_shards": None}, "reproducible='world' and micro_shards=None"),
        ({"reproducible": "bits"}, "reproducible='bits'"),
        ({"accumulate_grad_batches": 2}, "leave out accumulate_grad_batches"),
        ({"global_batch_size": 8, "on_oom": "shrink"}, "global_batch_size and"),
        ({"limit_train_batches": 4}, "counts the batches of a rank"),
        ({"check_val_every_n_epoch": None}, "counts the batches of a rank"),
    ],
)
def test_arguments_that_contradict_it_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(**{"reproducible": "world", "micro_shards": 4, **arguments})


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (Normed, {}, r"norm \(BatchNorm1d\).*\n.*GroupNorm"),
        (Manual, {}, "automatic_optimization=False"),
        (Transformer, {"strategy": "ddp", "devices": 3}, "divides micro_shards=4, got 3"),
        (
            Transformer,
            {"strategy": DDPStrategy(ddp_comm_hook="bf16"), "devices": 2},
            "got DDPStrategy.*\\n.*without ddp_comm_hook",
        ),
        (Transformer, {"strategy": "mesh:tp=2", "devices": 2}, "strategy='ddp' or 'fsdp' with"),
    ],
)
def test_what_depends_on_the_number_of_ranks_is_refused_by_name(
    module: type[Transformer], arguments: dict[str, Any], message: str
) -> None:
    trainer = quiet(reproducible="world", micro_shards=4, max_epochs=1, **arguments)
    with pytest.raises(LoopwrightError, match=message):
        trainer.fit(module(), DataLoader(Sentences(), 2))


def test_data_whose_order_depends_on_the_ranks_are_refused() -> None:
    trainer = quiet(reproducible="world", micro_shards=4, max_epochs=1, limit_val_batches=0)
    with pytest.raises(DataError, match="map-style data set"):
        trainer.fit(Transformer(), DataLoader(ShardedIterable(list(range(9))), 2))


def test_nothing_of_it_stays_after_the_fit() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    trainer = quiet(reproducible="world", micro_shards=4, max_steps=1, limit_val_batches=0)
    trainer.fit(Transformer(), DataLoader(Sentences(), 2))
    assert trainer.accumulate_grad_batches == 4
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


# --- the tree -------------------------------------------------------------------------------------------------------


def of_ranks(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's row of the sum of eight addends, and the norm of a sharded tensor."""
    addends = torch.randn(8, 8, 5, generator=torch.Generator().manual_seed(3))
    tree = TreeSum()
    for number in range(rank, 8, size):
        tree.add([sum_scattered(addends[number].reshape(size, -1).clone())])
    mesh = init_device_mesh("cpu", (size,))
    shards = [distribute_tensor(one, mesh, [Shard(0)]) for one in (addends[0].flatten()[:13], addends[1])]
    total = tree.total()[0]
    assert total is not None
    return total, tree_norm(shards, 2.0)


def test_sums_and_norms_have_the_same_bits_on_every_number_of_ranks() -> None:
    addends = torch.randn(8, 8, 5, generator=torch.Generator().manual_seed(3))
    one, two, three, four = (addends[first] + addends[first + 1] for first in (0, 2, 4, 6))
    wanted = ((one + two) + (three + four)).flatten()
    norms = {}
    for size in (2, 4):
        parts = run_ranks(of_ranks, size)
        assert torch.equal(torch.cat([part for part, _ in parts]), wanted)
        norms[size] = {norm.item() for _, norm in parts}
    own = tree_norm([addends[0].flatten()[:13], addends[1]], 2.0)
    assert norms == {2: {own.item()}, 4: {own.item()}}
    exact = torch.cat([addends[0].flatten()[:13], addends[1].flatten()]).double().norm()
    torch.testing.assert_close(own.double(), exact, rtol=1e-6, atol=0)


def test_means_are_rounded_once_in_any_order() -> None:
    draws = random.Random(5)
    pairs = [(draws.uniform(-1, 1) * 10 ** draws.randint(-30, 30), float(draws.randint(0, 1 << 20))) for _ in range(40)]

    def joined(part: list[tuple[float, float]]) -> tuple[float, float]:
        return exact_sums("mean", [value for value, _ in part], [weight for _, weight in part])

    wanted = (sum(Fraction(v) * int(w) for v, w in pairs), sum(int(w) for _, w in pairs))
    assert joined(pairs) == wanted
    draws.shuffle(pairs)
    halves = joined(pairs[::2]), joined(pairs[1::2])
    assert tuple(a + b for a, b in zip(*halves, strict=True)) == wanted
    assert math.isnan(exact_sums("sum", [1.0, math.inf, -math.inf], [1.0] * 3)[0])
    assert exact_sums("mean", [math.nan, 2.0], [0.0, 3.0]) == (6, 3)  # what weighs nothing does not count
