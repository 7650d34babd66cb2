"""However a global batch is cut into ranks, windows and micro-batches, weights and losses are those of one big batch.

For every strategy that adds gradients up by itself. Cuts are drawn: micro-batches of one to four samples, samples of
weight 0 to 3, ranks that weigh nothing, a short last window, data of known and of unknown length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import RecordingLogger

import loopwright as lw
from loopwright.strategies import FSDPStrategy

# Any in this file: batches, and results that travel between processes.

Whole = tuple[dict[str, Tensor], list[float], float]


@dataclass(frozen=True)
class Cut:
    """One training: windows of rounds, in each of which every rank has one micro-batch.

    Attributes:
        sizes: Samples of each micro-batch, by window, round and rank.
        weights: What each sample weighs, in the order of the data.
        has_length: Whether the data know it.
        form: In which the step returns its loss.
    """

    sizes: list[list[list[int]]]
    weights: list[int]
    has_length: bool
    form: str

    @property
    def accumulate(self) -> int:
        return len(self.sizes[0])

    def samples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(len(self.weights))
        x = torch.randn(len(self.weights), 4, generator=generator, dtype=torch.float64)
        y = torch.randn(len(self.weights), 3, generator=generator, dtype=torch.float64)
        return TensorDataset(x, y, torch.tensor(self.weights, dtype=torch.float64))

    def batches(self) -> list[list[int]]:
        """Return the samples of all micro-batches, round after round, and in a round rank after rank."""
        numbers = iter(range(len(self.weights)))
        return [[next(numbers) for _ in range(n)] for window in self.sizes for one in window for n in one]

    def windows(self) -> list[list[int]]:
        numbers = iter(range(len(self.weights)))
        return [[next(numbers) for one in window for n in one for _ in range(n)] for window in self.sizes]


def draw(seed: int, size: int) -> Cut:
    rng = random.Random(seed)
    accumulate = rng.randint(1, 3)
    lengths = [accumulate] * rng.randint(1, 2) + [rng.randint(1, accumulate)]
    sizes = [[[rng.randint(1, 4) for _ in range(size)] for _ in range(length)] for length in lengths]
    weights: list[int] = []
    empty = rng.randrange(2 * size)  # a rank that weighs nothing at all, now and then
    for window in sizes:
        first = len(weights)
        for one in window:
            for rank, count in enumerate(one):
                weights += [0 if rank == empty else rng.choice([0, 0, 1, 2, 3]) for _ in range(count)]
        if not any(weights[first:]):
            weights[-1 if empty != size - 1 else first] = 1
    return Cut(sizes, weights, rng.random() < 0.5, rng.choice(["loss", "host", "dict"]))


class Stream(IterableDataset[Any]):
    """This rank's micro-batches, of which nobody knows how many there are."""

    def __init__(self, cut: Cut, rank: int, size: int) -> None:
        self.batches = [cut.samples()[indices] for indices in cut.batches()[rank::size]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Net(lw.Module):
    """Layers that divide by nothing; the loss is a sum over samples that weigh differently."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.form = form

    def sums(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, weight = batch
        error = self.last(self.first(x.to(self.last.bias.dtype)).tanh()) - y.to(self.last.bias.dtype)
        return (error.square().mean(1) * weight.to(error.dtype)).sum(), weight.sum().to(error.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total, weight = self.sums(batch)
        self.log("loss", lw.Loss(total, weight), on_step=True, on_epoch=True, sync_dist=True)
        if self.form == "dict":
            return {"loss_sum": total, "weight": weight}
        return lw.Loss(total, float(weight) if self.form == "host" else weight)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Reductions(lw.Callback, TorchDispatchMode):
    """Counts, for each window, what reduces gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.count = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.__exit__(None, None, None)
        if trainer.at_step_boundary:
            self.counts.append(self.count)
            self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Integers are counts and digests that ranks compare.
        tensors = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        is_of_floats = any(isinstance(one, Tensor) and one.is_floating_point() for one in tensors)
        self.count += func.namespace == "c10d" and "reduce" in func.__name__ and is_of_floats
        return func(*args, **(kwargs or {}))


def by_hand(cut: Cut, dtype: torch.dtype = torch.float64) -> Whole:
    module = Net(cut.form).to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, total_sum, total_weight = [], 0.0, 0.0
    for window in cut.windows():
        total, weight = module.sums(cut.samples()[window])
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
        total_sum, total_weight = total_sum + total.item(), total_weight + weight.item()
    return module.state_dict(), losses, total_sum / total_weight


def train(rank: int, size: int, name: str, cuts: list[Cut], precision: str) -> list[Any]:
    results = []
    for cut in cuts:
        module, counter, logger = Net(cut.form), Reductions(), RecordingLogger()
        strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}) if name == "fsdp" else name
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, precision=precision, logger=logger,
            accumulate_grad_batches=cut.accumulate, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, log_every_n_steps=1,
            callbacks=[counter] if name == "fsdp" else None,
        )  # fmt: skip
        if cut.has_length:
            loader = DataLoader(cut.samples(), batch_sampler=cut.batches())
        else:
            loader = DataLoader(Stream(cut, rank, size), batch_size=None)
        trainer.fit(module, loader)
        assert trainer.global_step == len(cut.sizes)
        with torch.no_grad():
            state = trainer.strategy.gather_state(trainer.strategy.module_state_dict(trainer.model))
            state = {key: value.clone() for key, value in state.items() if value is not None}
        losses = [value for _, value in logger.values("loss_step")]
        results.append((state, losses, float(trainer.callback_metrics["loss_epoch"]), counter.counts))
    return results


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [("ddp", 2, 6), ("ddp", 3, 6), ("fsdp", 2, 6), ("fsdp", 3, 6), ("deepspeed_stage_2", 2, 2)],
)
def test_weights_and_losses_do_not_depend_on_the_split(name: str, size: int, count: int) -> None:
    is_engine = name.startswith("deepspeed")
    if is_engine:
        import_deepspeed()
    precision, dtype, rel = ("32-true", torch.float32, 2e-5) if is_engine else ("64-true", torch.float64, 1e-12)
    cuts = [draw(100 * size + seed, size) for seed in range(count)]
    everywhere = run_ranks(train, size, name, cuts, precision, connect=False)
    for number, cut in enumerate(cuts):
        weights, losses, epoch = by_hand(cut, dtype)
        for rank, results in enumerate(everywhere):
            state, found, found_epoch, reductions = results[number]
            case = f"rank {rank}: {cut}"
            assert found == (pytest.approx(losses, rel=rel) if rank == 0 else []), case
            assert found_epoch == pytest.approx(epoch, rel=rel), case
            assert rank or state, case
            for key, value in state.items():
                torch.testing.assert_close(value, weights[key], rtol=rel, atol=rel, msg=f"{case}: {key}")
            # A window reduces its gradients once, be it short or found to be short. After 1, 2, 4, ... of them the
            # ranks also compare which parameters they used.
            compared = [number & (number - 1) == 0 for number in range(1, len(reductions) + 1)]
            once = {count - extra for count, extra in zip(reductions, compared, strict=True)}
            assert len(once) == (name == "fsdp"), case
            assert 0 not in reductions, case
