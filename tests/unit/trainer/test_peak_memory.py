"""The largest sum of live tensors during training: no more than in the loop that everybody writes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from toys import quiet

import loopwright as lw

ROWS, WIDTH, HIDDEN = 64, 256, 128
# Smaller than a batch (64 KiB), an activation (32 KiB) or a weight (128 KiB); larger than states of generators.
SMALLEST_BYTES = 16 * 1024


class LiveTensors(TorchDispatchMode):
    """Adds up the storages that operations made and that are still alive; `peak` is the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size >= SMALLEST_BYTES and key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class Rows(Dataset[Tensor]):
    """Makes each row anew, so that a batch lives as long as somebody holds it."""

    def __len__(self) -> int:
        return 5 * ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index / 100)


class Wide(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH), nn.Tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        if self._lw_trainer is not None:
            self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("error", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[Tensor]:
    return DataLoader(Rows(), batch_size=ROWS)


def by_hand(*, accumulate: int, clip: float | None, validates: bool) -> int:
    module, data = Wide(), loader()
    optimizer = module.configure_optimizers()
    gc.collect()
    with LiveTensors() as live:
        for _ in range(2):
            for index, batch in enumerate(data):
                if index % accumulate == 0:
                    optimizer.zero_grad()
                loss = module.training_step(batch, index) / accumulate
                loss.backward()
                if (index + 1) % accumulate == 0 or index + 1 == len(data):
                    if clip is not None:
                        nn.utils.clip_grad_norm_(module.parameters(), clip)
                    optimizer.step()
            if validates:
                optimizer.zero_grad()
                with torch.no_grad():
                    for batch in data:
                        module.net(batch).square().mean()
    return live.peak


def by_trainer(*, accumulate: int, clip: float | None, validates: bool, kind: type[Wide] = Wide) -> int:
    trainer = quiet(
        max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip,
        limit_val_batches=1.0 if validates else 0,
    )  # fmt: skip
    module = kind()
    gc.collect()
    with LiveTensors() as live:
        trainer.fit(module, loader(), loader())
    return live.peak


@pytest.mark.parametrize(
    ("accumulate", "clip", "validates"),
    [(1, None, False), (2, None, False), (1, 0.1, False), (1, None, True), (2, 0.1, True)],
)
def test_a_step_has_no_more_live_tensors_than_the_handwritten_loop(
    accumulate: int, clip: float | None, validates: bool
) -> None:
    hand = by_hand(accumulate=accumulate, clip=clip, validates=validates)
    ours = by_trainer(accumulate=accumulate, clip=clip, validates=validates)
    print(f"peak of live tensors: {ours} bytes, by hand {hand}")
    assert ours <= hand


def test_the_measure_sees_what_is_held() -> None:
    class Holding(Wide):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.held = [batch, *getattr(self, "held", [])][:2]
            return super().training_step(batch, batch_idx)

    plain = by_trainer(accumulate=1, clip=None, validates=False)
    assert by_trainer(accumulate=1, clip=None, validates=False, kind=Holding) == plain + ROWS * WIDTH * 4


def test_hooks_on_zero_grad_see_gradients_after_the_forward_pass() -> None:
    class Listening(Wide):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.had_gradient.append(self.net[0].weight.grad is not None)
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            assert (self.net[0].weight.grad is not None) == bool(self.trainer.global_step)

    for kind, expected in ((Listening, [False, True, True, True, True]), (type("Deaf", (Listening,), {
        "on_before_zero_grad": lw.Module.on_before_zero_grad}), [False] * 5)):  # fmt: skip
        module = kind()
        module.had_gradient = []
        quiet(max_epochs=1, limit_val_batches=0).fit(module, loader())
        assert module.had_gradient == expected


def test_gradients_can_be_read_until_the_next_step_or_a_validation_begins() -> None:
    class Noting(Wide):
        def note(self, at: str) -> None:
            self.seen.append((at, self.net[0].weight.grad is not None))

        def on_train_batch_start(self, *args: Any) -> None:
            self.note("start")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.note("step")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            self.note("end")

        def on_validation_start(self) -> None:
            self.note("validation")

    module = Noting()
    module.seen = []
    quiet(max_steps=2, limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=2).fit(
        module, loader(), loader()
    )
    steps = [("start", False), ("step", False), ("end", True), ("start", True), ("step", False), ("end", True)]
    assert module.seen == [*steps, ("validation", False)]
