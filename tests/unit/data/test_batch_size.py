"""The number of samples in a batch, where its tensors alone say another: means over an epoch weigh by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
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
    if isinstance(batch, tuple) and isinstance(batch[0], tuple):  # images, and boxes
        return torch.stack([image.mean() for image in batch[0]]).mean()
    if isinstance(batch, dict):
        return batch["x"].mean()
    return torch.cat([one.reshape(-1) for one in batch]).mean() if isinstance(batch, list | tuple) else batch.mean()


def samples(*shape: int, count: int = 10) -> list[Tensor]:
    return [torch.full(shape, float(number)) for number in range(count)]


class Stream(IterableDataset[Tensor]):
    def __init__(self, *shape: int) -> None:
        self.shape = shape or (3, 2)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(samples(*self.shape))


def time_first(batch: list[Tensor]) -> Tensor:
    return torch.stack(batch, 1)


class Graph:
    """Many samples in one object, which does not tell their number."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = list(parts)

    def to(self, device: Any, **options: Any) -> Graph:
        return type(self)([part.to(device) for part in self.parts])

    def mean(self) -> Tensor:
        return torch.stack([part.reshape(-1)[0] for part in self.parts]).mean()


class TellingGraph(Graph):
    @property
    def num_graphs(self) -> int:
        return len(self.parts)


class Batches(Dataset[Graph]):
    """Makes a batch of several indices."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> Graph:
        return Graph([samples(1)[number] for number in index])


class Buckets(Sampler[list[int]]):
    """Batches of any size, as samplers that fill batches by tokens give them."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2, 3, 4, 5], [6, 7, 8], [9]])

    def __len__(self) -> int:
        return 4


def detection(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def targets() -> list[Any]:
    return [(torch.full((2, 3 + number), float(number)), {"boxes": torch.zeros(number, 4)}) for number in range(10)]


CERTAIN: dict[str, Callable[[], Any]] = {
    "stacked by torch": lambda: DataLoader(samples(3, 2), 4),
    "fields of one shape, by torch": lambda: DataLoader([(one, one) for one in samples(3)], 4),
    "a list of images": lambda: DataLoader(samples(3, 2, 2), 4, collate_fn=list),
    "a list of vectors as long as the rest": lambda: DataLoader(samples(2), 4, collate_fn=list),
    "a tuple of images": lambda: DataLoader(samples(3, 2, 2), 4, collate_fn=tuple),
    "a list of images from a stream": lambda: DataLoader(Stream(), 4, collate_fn=list),
    "stacked by the user": lambda: DataLoader(samples(3, 2), 4, collate_fn=torch.stack),
    "a dict by the user": lambda: DataLoader(samples(3), 4, collate_fn=lambda batch: {"x": torch.stack(batch)}),
    "graphs": lambda: DataLoader(samples(3), 4, collate_fn=Graph),
    "graphs from workers": lambda: DataLoader(samples(3), 4, collate_fn=Graph, num_workers=1),
    "graphs from persistent workers": lambda: DataLoader(
        samples(3), 4, collate_fn=Graph, num_workers=2, persistent_workers=True, shuffle=True
    ),
    "graphs in buckets": lambda: DataLoader(samples(3), batch_sampler=Buckets(), collate_fn=Graph),
    "graphs of a data set that makes batches": lambda: DataLoader(
        Batches(), sampler=BatchSampler(range(10), 4, drop_last=False), batch_size=None
    ),
    "graphs in a list that tell their number": lambda: [
        TellingGraph(samples(3)[:4]),
        TellingGraph(samples(3)[4:8]),
        TellingGraph(samples(3)[8:]),
    ],
    "images and boxes": lambda: DataLoader(targets(), 4, collate_fn=detection),  # type: ignore[arg-type]
    "lists of the same length as a sample": lambda: DataLoader(samples(4), 4, collate_fn=list),
    "time first": lambda: DataLoader(samples(5, 2), 4, collate_fn=time_first),
    "time first, as long as a batch": lambda: DataLoader(samples(4, 2), 4, collate_fn=time_first),
    "buckets, time first": lambda: DataLoader(samples(5, 2), batch_sampler=Buckets(), collate_fn=time_first),
    "a distributed sampler": lambda: DataLoader(
        samples(3),
        4,
        sampler=DistributedSampler(samples(3), 1, 0),
        collate_fn=Graph,  # type: ignore[arg-type]
    ),
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


def test_objects_whose_size_nobody_tells_weigh_1_which_a_warning_says() -> None:
    with pytest.warns(UserWarning, match="the size of a batch of objects is unknown.*pass batch_size="):
        trainer = fit(lambda: [Graph(samples(3)[:4]), Graph(samples(3)[4:])])
    assert float(trainer.callback_metrics["training"]) == (1.5 + 6.5) / 2


@pytest.mark.filterwarnings("ignore:validation is skipped")
def test_windows_that_are_held_weigh_each_batch() -> None:
    class Closure(Mean):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    trainer = quiet(max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(Closure(), DataLoader(samples(3), 4, collate_fn=Graph))
    assert (float(trainer.callback_metrics["training"]), trainer.progress.samples) == (4.5, 10)


def test_time_first_batches_are_counted_along_their_second_dimension_and_named_in_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"expected batches of 4 samples.*got 5 in the first dimension; dimension 1.*pass batch_size="
    ):
        trainer = fit(lambda: DataLoader(Stream(5, 2), 4, collate_fn=time_first))
    assert float(trainer.callback_metrics["training"]) == float(trainer.callback_metrics["validation"]) == 4.5
    assert trainer.progress.samples == 10


@pytest.mark.parametrize(
    "form", [list, lambda it: {"images": it, "names": ["a"] * len(it)}, lambda it: (it, [1] * len(it))]
)
def test_what_nobody_can_know_is_named_in_a_warning_once(form: Callable[[list[Tensor]], Any]) -> None:
    sizes = BatchSizes([])
    with pytest.warns(UserWarning, match=r"a list of 4 tensors of one shape.*pass batch_size= to self.log"):
        assert sizes.of(form(samples(3, count=4))) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes.of(form(samples(3, count=2))) == 3


def test_lists_of_fields_beside_a_tensor_of_the_size_are_no_reason_for_a_warning() -> None:
    layers = [torch.ones(3, 2)] * 5
    assert BatchSizes([]).of({"layers": layers, "labels": torch.ones(3)}) == 3


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
