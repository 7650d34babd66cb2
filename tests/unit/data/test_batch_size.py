"""The number of samples in a batch, where its tensors alone say another: means over an epoch weigh by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from toys import quiet

import loopwright as lw
from loopwright.data.batch_size import BatchSizes


class Mean(lw.Module):
    """Logs the mean over each batch: over the epoch it is that of all samples only if batches weigh what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("training", mean(batch), on_step=False, on_epoch=True)
        return self.layer(torch.ones(1, 1)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", mean(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def mean(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return batch["x"].mean()
    return torch.cat([one.reshape(-1) for one in batch]).mean() if isinstance(batch, list | tuple) else batch.mean()


def samples(*shape: int, count: int = 10) -> list[Tensor]:
    return [torch.full(shape, float(number)) for number in range(count)]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(samples(3, 2))


def time_first(batch: list[Tensor]) -> Tensor:
    return torch.stack(batch, 1)


CERTAIN: dict[str, Callable[[], Any]] = {
    "stacked by torch": lambda: DataLoader(samples(3, 2), 4),
    "fields of one shape, by torch": lambda: DataLoader([(one, one) for one in samples(3)], 4),
    "a list of images": lambda: DataLoader(samples(3, 2, 2), 4, collate_fn=list),
    "a list of vectors as long as the rest": lambda: DataLoader(samples(2), 4, collate_fn=list),
    "a tuple of images": lambda: DataLoader(samples(3, 2, 2), 4, collate_fn=tuple),
    "a list of images from a stream": lambda: DataLoader(Stream(), 4, collate_fn=list),
    "stacked by the user": lambda: DataLoader(samples(3, 2), 4, collate_fn=torch.stack),
    "a dict by the user": lambda: DataLoader(samples(3), 4, collate_fn=lambda batch: {"x": torch.stack(batch)}),
    "a batch sampler": lambda: DataLoader(samples(3), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
}


def fit(make: Callable[[], Any]) -> lw.Trainer:
    trainer = quiet(max_epochs=1)
    trainer.fit(Mean(), make(), make())
    return trainer


@pytest.mark.parametrize("make", CERTAIN.values(), ids=CERTAIN)
def test_means_samples_and_steps_weigh_each_sample_once(make: Callable[[], Any]) -> None:
    trainer = fit(make)
    assert float(trainer.callback_metrics["training"]) == float(trainer.callback_metrics["validation"]) == 4.5
    assert trainer.progress.samples == 10


def test_time_first_batches_are_counted_along_their_second_dimension_and_named_in_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"expected batches of 4 samples.*got 5 in the first dimension; dimension 1.*pass batch_size="
    ):
        trainer = fit(lambda: DataLoader(samples(5, 2), 4, collate_fn=time_first))
    assert float(trainer.callback_metrics["training"]) == float(trainer.callback_metrics["validation"]) == 4.5
    assert trainer.progress.samples == 10


def test_what_nobody_can_know_is_named_in_a_warning_once() -> None:
    class Lists:
        def __iter__(self) -> Iterator[list[Tensor]]:
            yield samples(3, count=4)
            yield samples(3, count=2)

    sizes = BatchSizes(Lists())
    first, second = Lists()
    with pytest.warns(UserWarning, match=r"a list of 4 tensors of one shape.*pass batch_size= to self.log"):
        assert sizes.of(first) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes.of(second) == 3


def test_fields_of_different_shapes_are_no_reason_for_a_warning() -> None:
    sizes = BatchSizes([])
    assert [sizes.of([torch.ones(size, 4), torch.ones(size, 1)]) for size in (4, 4, 2)] == [4, 4, 2]


def test_a_size_that_is_logged_wins() -> None:
    class Named(Mean):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", mean(batch), batch_size=len(batch))

    batches = [samples(3, count=4), samples(3, count=2)]
    [row] = quiet().validate(Named(), [batches[0], batches[1]], verbose=False)
    assert row["validation"] == pytest.approx((0 + 1 + 2 + 3 + 0 + 1) / 6, abs=1e-6)  # float32
