"""Loaders of every shape in fit, validate, test and predict; batches of every kind; data modules; what goes wrong."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from toys import quiet

import loopwright as lw
from loopwright.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Worker processes are forked: torch must not have threads then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(first: int, count: int, batch_size: int = 2, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(range(first, first + count), batch_size, **kwargs)  # type: ignore[arg-type]


def plain(batch: Any) -> Any:
    """Return the batch with lists of numbers in place of tensors."""
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


class Reader(lw.Module):
    """Keeps what each step gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: dict[str, list[Any]] = {}

    def see(self, stage: str, batch: Any, *where: int) -> None:
        self.seen.setdefault(stage, []).append((plain(batch), *where))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see("fit", batch, batch_idx)
        return self.weight.square()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.see("validate", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.see("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.see("predict", batch, batch_idx, dataloader_idx)
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(verb: str, data: Any, **arguments: Any) -> list[Any]:
    """Return what the verb's step got."""
    module = Reader()
    if verb == "fit":
        arguments["limit_val_batches"] = 0
    getattr(quiet(max_epochs=1, **arguments), verb)(module, data)
    return module.seen[verb]


# --- collections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_loaders_train_together_until_the_longest_ends(workers: int) -> None:
    data = {"a": numbers(0, 3, num_workers=workers), "b": [numbers(10, 5), (numbers(20, 2), [[7], [8]])]}
    assert run("fit", data) == [
        ({"a": [0, 1], "b": [[10, 11], [[20, 21], [7]]]}, 0),
        ({"a": [2], "b": [[12, 13], [[20, 21], [8]]]}, 1),
        ({"a": [0, 1], "b": [[14], [[20, 21], [7]]]}, 2),
    ]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_nested_loaders_are_evaluated_one_after_the_other(verb: str) -> None:
    data = {"a": numbers(0, 3), "b": [numbers(10, 1), (numbers(20, 4), [[7]])]}
    in_turn = [([0, 1], 0, 0), ([2], 1, 0), ([10], 0, 1), ([20, 21], 0, 2), ([22, 23], 1, 2), ([7], 0, 3)]
    assert run(verb, data) == in_turn
    assert run(verb, lw.CombinedLoader(data, "sequential")) == in_turn
    name = {"validate": "val"}.get(verb, verb)
    limited = run(verb, data, **{f"limit_{name}_batches": 1})
    assert limited == [one for one in in_turn if one[1] == 0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [{"a": [0, 1], "b": [9, 8]}, {"a": [2], "b": [7]}]),
        ("max_size", [{"a": [0, 1], "b": [9, 8]}, {"a": [2], "b": [7]}, {"a": None, "b": [6]}]),
        ("max_size_cycle", [{"a": [0, 1], "b": [9, 8]}, {"a": [2], "b": [7]}, {"a": [0, 1], "b": [6]}]),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_modes_mean_the_same_in_training_and_evaluation(verb: str, mode: str, expected: list[Any]) -> None:
    seen = run(verb, lw.CombinedLoader({"a": numbers(0, 3), "b": [[9, 8], [7], [6]]}, mode))
    assert [one[0] for one in seen] == expected
    assert [one[1:] for one in seen] == [(i,) if verb == "fit" else (i, 0) for i in range(len(expected))]


def test_a_sequence_of_loaders_can_be_trained_on() -> None:
    data = lw.CombinedLoader([numbers(0, 3), numbers(10, 2)], "sequential")
    assert run("fit", data) == [([0, 1], 0), ([2], 1), ([10, 11], 2)]


@pytest.mark.parametrize(("limit", "count"), [(2, 2), (0.5, 1), (1.0, 3)])
def test_limits_count_batches_of_the_collection(limit: Any, count: int) -> None:
    data = {"a": numbers(0, 3), "b": numbers(10, 5)}
    assert len(run("fit", data, limit_train_batches=limit)) == count


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_combined_loader_among_others_gives_its_batches(verb: str) -> None:
    pairs = lw.CombinedLoader([numbers(0, 3), numbers(10, 2)], "max_size")
    expected = [([[0, 1], [10, 11]], 0, 0), ([[2], None], 1, 0), ([5, 6], 0, 1)]
    assert run(verb, [pairs, numbers(5, 2)]) == expected
    assert run(verb, lw.CombinedLoader([pairs, numbers(5, 2)], "sequential")) == expected
    name = {"validate": "val"}.get(verb, verb)
    assert run(verb, [pairs, numbers(5, 4)], **{f"limit_{name}_batches": 0.5}) == [expected[0], expected[2]]


def test_a_combined_loader_within_another_gives_its_batches() -> None:
    def make() -> lw.CombinedLoader:
        return lw.CombinedLoader([lw.CombinedLoader([numbers(0, 3)], "min_size"), numbers(5, 3)], "max_size_cycle")

    expected = [[[[0, 1]], [5, 6]], [[[2]], [7]]]
    assert [batch for batch, *_ in run("fit", make())] == expected
    assert [batch for batch, *_ in run("validate", make())] == expected
    assert [plain(batch) for batch, _, _ in make()] == expected


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_prediction_reads_loaders_in_turn_only(mode: str) -> None:
    with pytest.raises(ConfigError, match="use mode='sequential'"):
        quiet().predict(Reader(), lw.CombinedLoader([numbers(0, 2)], mode))


class Says(IterableDataset[int]):
    """Five numbers, shared out to the workers, and a length that may be wrong."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(5)) if worker is None else iter(range(worker.id, 5, worker.num_workers))


class SaysIt(list[int]):
    """A sampler of five indices with a length that may be wrong."""

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_data_that_end_before_the_length_they_say_end_the_epoch(workers: int, accumulate: int) -> None:
    module = Reader()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Says(40), 2, num_workers=workers), [torch.ones(1)])
    batches = [[0, 1], [2, 3], [4]] if not workers else [[0, 2], [1, 3], [4]]
    assert [batch for batch, _ in module.seen["fit"]] == batches * 2
    assert len(module.seen["validate"]) == 2
    assert trainer.global_step == 2 * -(-3 // accumulate)


def test_an_empty_loader_in_a_collection_is_named() -> None:
    with pytest.raises(DataError, match=r"Loader 1 .* yields no batches\.\n.*leave it out"):
        run("fit", [numbers(0, 3), numbers(0, 0)])


def test_so_does_a_sampler_and_a_collection() -> None:
    sampler = SaysIt(range(5))
    assert len(run("fit", DataLoader(range(5), 2, sampler=sampler))) == 3  # type: ignore[arg-type]
    assert len(run("fit", {"a": DataLoader(Says(40), 2), "b": numbers(0, 8)})) == 4


# --- batches -------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Fields:
    x: Tensor
    note: str | None = None


class Graph:
    """Moves itself."""

    def __init__(self) -> None:
        self.device = torch.device("meta")

    def to(self, device: torch.device) -> Graph:
        self.device = device
        return self


def test_batches_of_any_kind_arrive_and_are_counted() -> None:
    class Keeper(Reader):
        def see(self, stage: str, batch: Any, *where: int) -> None:
            self.seen.setdefault(stage, []).append(batch)

    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    batches = [
        Named(torch.zeros(3), "text"),
        Fields(torch.zeros(4)),
        OrderedDict(x=torch.zeros(5), y=None, z=["a", "b"]),
        packed,
        {"graph": Graph(), "x": torch.zeros(6)},
    ]
    module, trainer = Keeper(), quiet(max_epochs=1, limit_val_batches=0)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]

    assert [type(one) for one in module.seen["fit"]] == [Named, Fields, OrderedDict, PackedSequence, dict]
    assert module.seen["fit"][4]["graph"].device == torch.device("cpu")
    assert trainer.progress.samples == 3 + 4 + 5 + 2 + 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_a_batch() -> None:
    batch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    class Logs(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("loss", self.weight.detach() + batch_idx, on_epoch=True)
            return self.weight.square()

    trainer = quiet(max_epochs=1, limit_val_batches=0)
    trainer.fit(Logs(), [batch, {"x": batch}])
    assert "loss" in trainer.callback_metrics


def test_what_cannot_move_is_named_with_its_place() -> None:
    class Stuck:
        def to(self, dtype: str, copy: bool) -> Any:
            raise AssertionError

    batch = {"inputs": [torch.zeros(1), Fields(torch.zeros(1), note=Stuck())]}  # type: ignore[arg-type]
    with pytest.raises(TypeError) as caught:
        quiet(max_epochs=1, limit_val_batches=0).fit(Reader(), [batch])
    assert any("batch['inputs'][1].note, a Stuck, to cpu" in note for note in caught.value.__notes__)


# --- data modules --------------------------------------------------------------------------------------------------


class Data(lw.DataModule):
    """Writes down what is called."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []
        self.epochs_made = 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        assert self.trainer.datamodule is self
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.epochs_made += 1
        return {"a": numbers(0, 4, self.hparams.size), "b": [numbers(10 * self.epochs_made, 2)]}

    def val_dataloader(self) -> Any:
        return [numbers(100, 2), numbers(200, 2)]

    def test_dataloader(self) -> Any:
        return numbers(300, 2)

    def predict_dataloader(self) -> Any:
        return lw.CombinedLoader({"x": numbers(400, 2), "y": numbers(500, 2)}, "sequential")

    def state_dict(self) -> dict[str, Any]:
        return {"epochs_made": self.epochs_made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs_made = state_dict["epochs_made"]


def test_a_data_module_serves_every_verb(tmp_path: Path) -> None:
    module, data, trainer = Reader(), Data(size=2), quiet(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, data)
    assert trainer.datamodule is data
    assert [one[0]["b"] for one in module.seen["fit"]] == [[[10, 11]], [[10, 11]], [[20, 21]], [[20, 21]]]
    trainer.validate(module, data)
    trainer.test(module, datamodule=data)
    assert plain(trainer.predict(module, data)) == [[[400, 401]], [[500, 501]]]
    stages = ["fit", "validate", "test", "predict"]
    assert data.calls == [call for s in stages for call in ("prepare_data", f"setup {s}", f"teardown {s}")]

    trainer.save_checkpoint(tmp_path / "some.ckpt")
    again = Data.load_from_checkpoint(tmp_path / "some.ckpt")
    assert (again.hparams.size, again.epochs_made) == (2, 2)


def test_a_data_module_made_from_data_sets() -> None:
    module = Reader()
    data = lw.DataModule.from_datasets(
        train_dataset={"a": range(4), "b": range(4)}, val_dataset=[range(2), range(3)], predict_dataset=range(3),
        batch_size=2,
    )  # fmt: skip
    trainer = quiet(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, data)
    assert sorted(number for one in module.seen["fit"] for number in one[0]["a"]) == [0, 1, 2, 3]
    assert [one[2] for one in module.seen["validate"]] == [0, 1, 1]
    assert plain(trainer.predict(module, data)) == [[0, 1], [2]]


# --- what goes wrong -----------------------------------------------------------------------------------------------


class Everything(IterableDataset[int]):
    """Forgets that it is read by several workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize(("workers", "is_said"), [(2, True), (1, False), (0, False)])
def test_workers_that_all_read_everything_are_named(
    workers: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "loopwright.data"):
        seen = run("fit", DataLoader(Everything(), 2, num_workers=workers))
    assert len(seen) == 3 * max(1, workers)
    assert ("The 2 workers of DataLoader read the same data: each of them yields all of Everything" in caplog.text) is (
        is_said
    )


def test_a_generator_cannot_be_validated_with_twice() -> None:
    def once() -> Iterator[Tensor]:
        yield from torch.ones(3, 1)

    module = Reader()
    quiet().validate(module, once())
    assert len(module.seen["validate"]) == 3
    with pytest.raises(DataError, match="for val is a generator object, which can be read only once, and the check"):
        quiet(max_epochs=1).fit(Reader(), [torch.ones(1)], once())
    with pytest.raises(DataError, match="can be read only once, and it was read before"):
        quiet(max_epochs=2, num_sanity_val_steps=0).fit(Reader(), [torch.ones(1)], once())


@pytest.mark.parametrize("empty", [numbers(0, 0), iter([])], ids=["sized", "unsized"])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_without_batches_is_said(verb: str, empty: Any) -> None:
    with pytest.warns(UserWarning, match="data (has|gave) no batches: nothing"):
        getattr(quiet(), verb)(Reader(), [empty, numbers(0, 0)])


@pytest.mark.parametrize(
    ("verb", "name"), [("fit", "train"), ("validate", "val"), ("test", "test"), ("predict", "predict")]
)
def test_a_fraction_of_data_without_a_length_names_the_argument(verb: str, name: str) -> None:
    data = DataLoader(Everything(), 2)
    with pytest.raises(ConfigError, match=f"limit_{name}_batches=0.5 is a fraction, but the loader does not say"):
        run(verb, data, **{f"limit_{name}_batches": 0.5})


def test_a_limit_reads_nothing_behind_it() -> None:
    class Endless(IterableDataset[int]):
        index = -1

        def __iter__(self) -> Iterator[int]:
            while True:
                self.index += 1
                yield self.index

    module = Reader()
    data = Endless()
    quiet(max_epochs=3, limit_train_batches=2, limit_val_batches=0).fit(module, DataLoader(data, 2))
    assert [one[0] for one in module.seen["fit"]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
