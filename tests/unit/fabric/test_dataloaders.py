from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from loopwright.errors import ConfigError, DataError, ModuleError
from loopwright.fabric import Fabric
from loopwright.fabric.dataloaders import EvaluationPass, FabricDataLoader, _merge, gather_samples


def machine() -> Fabric:
    return Fabric(accelerator="cpu")


def numbers(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_passes_equal_those_of_the_plain_loader(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(range(10), batch_size=3, shuffle=True, num_workers=workers)  # type: ignore[arg-type]

    torch.manual_seed(0)
    plain_loader = make()
    plain = [numbers(plain_loader), numbers(plain_loader)]
    torch.manual_seed(0)
    loader = machine().setup_dataloaders(make())
    assert isinstance(loader, FabricDataLoader)
    assert len(loader) == 4
    assert loader.batch_size == 3
    assert loader.device == torch.device("cpu")
    assert [numbers(loader), numbers(loader)] == plain


def test_several_loaders_come_back_as_a_list() -> None:
    fabric = machine()
    one, two = fabric.setup_dataloaders([1], [2, 3])
    assert (list(one), list(two), len(two)) == ([1], [2, 3], 2)
    assert fabric.setup_dataloaders([1], move_to_device=False).device is None
    with pytest.raises(ConfigError, match="Expected a loader"):
        fabric.setup_dataloaders()
    with pytest.raises(ModuleError, match="cannot be iterated"):
        fabric.setup_dataloaders(3)
    with pytest.raises(ConfigError, match=r"uneven='kep' \(did you mean 'keep'\?\)"):
        fabric.setup_dataloaders([1], uneven="kep")
    with pytest.raises(TypeError, match="no known number of batches"):
        len(fabric.setup_dataloaders(DataLoader(_Endless(), batch_size=1)))


class _Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_batches_are_moved_and_outer_modes_do_not_matter() -> None:
    class Moves:
        moved: Any = None

        def to(self, device: Any, **kwargs: Any) -> Any:
            self.moved = device
            return self

    fabric = machine()
    with torch.no_grad():
        evaluated = list(fabric.setup_dataloaders([Moves()]))
    trained = list(fabric.setup_dataloaders([Moves()]))
    assert [batch.moved for batch in (*evaluated, *trained)] == [torch.device("cpu")] * 2


def test_samplers_get_the_number_of_the_pass() -> None:
    told: list[int] = []

    class Sampler(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    loader = machine().setup_dataloaders(DataLoader(range(4), sampler=Sampler(range(4))))  # type: ignore[arg-type]
    list(loader)
    with torch.no_grad():
        list(loader)
    list(loader)
    assert told == [0, 1, 2]


def test_a_pass_can_be_left_and_begun_again() -> None:
    loader = machine().setup_dataloaders([1, 2, 3])
    assert next(iter(loader)) == 1
    for batch in loader:
        if batch == 2:
            break
    assert list(loader) == [1, 2, 3]


def test_two_passes_at_once_are_an_error_and_not_a_mixture() -> None:
    loader = machine().setup_dataloaders([1, 2, 3])
    first = iter(loader)
    assert next(first) == 1
    second = iter(loader)
    assert next(second) == 1
    with pytest.raises(DataError, match="got a second one"):
        next(first)
    assert list(second) == [2, 3]


def test_what_is_left_of_a_pass_is_known() -> None:
    fabric = machine()
    loader = fabric.setup_dataloaders(DataLoader(range(5)))  # type: ignore[arg-type]
    assert [loader.batches_left(2) for _ in loader] == [2, 2, 2, 1, 0]
    assert loader.batches_left(2) == 0
    assert fabric._reader is None


def test_evaluation_within_a_training_pass_leaves_it_alone() -> None:
    fabric = machine()
    train, evaluate = fabric.setup_dataloaders(DataLoader(range(4), shuffle=True), DataLoader(range(3)))  # type: ignore[arg-type]
    torch.manual_seed(0)
    alone = numbers(train)
    torch.manual_seed(0)
    seen = []
    for batch in train:
        with torch.no_grad():
            assert len(list(evaluate)) == 3
        assert fabric._reader is train
        seen.append(batch.tolist())
    assert seen == alone


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_saved_pass_goes_on_where_it_was(stop: int) -> None:
    def make(fabric: Fabric) -> Any:
        return fabric.setup_dataloaders(DataLoader(range(8), batch_size=2, shuffle=True))  # type: ignore[arg-type]

    torch.manual_seed(0)
    loader = make(machine())
    seen, state = [], {}
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == stop:
            state = loader.state_dict()
            rng = torch.get_rng_state()
    following = numbers(loader)

    torch.manual_seed(99)
    other = make(machine())
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    assert numbers(other) == seen[stop:]
    assert torch.equal(torch.get_rng_state(), rng)  # what is drawn between is training's
    assert numbers(other) == following


def test_collective_results_are_joined_by_structure() -> None:
    tensor = torch.ones
    parts = [
        {"x": tensor(2, 3), "n": torch.tensor(1), "pair": (tensor(1), [tensor(2)]), "names": ["a"], "o": 1},
        {"x": tensor(1, 3), "n": torch.tensor(2), "pair": (tensor(0), [tensor(1)]), "names": ["b", "c"], "o": 2},
    ]
    joined = _merge(parts)
    assert joined["x"].shape == (3, 3)
    assert joined["n"].tolist() == [1, 2]
    assert joined["pair"][0].shape == (1,)
    assert joined["pair"][1][0].shape == (3,)
    assert joined["names"] == ["a", "b", "c"]
    assert joined["o"] == [1, 2]
    with pytest.raises(ModuleError, match=r"lists of equal length on all ranks .* got lengths \[1, 2\]"):
        _merge([[tensor(1)], [tensor(1), tensor(1)]])


@pytest.mark.parametrize(
    ("rank", "size", "count", "batches", "expected"),
    [(0, 2, 3, 2, True), (0, 2, 3, 1, False), (0, 2, 4, 2, False), (1, 3, 5, 2, True), (0, 2, 1, 1, True)],
)
def test_the_last_round_of_an_evaluation(rank: int, size: int, count: int, batches: int, expected: bool) -> None:
    current = EvaluationPass(size, count)
    current.num_batches = batches
    assert current.is_in_last_round(rank) is expected


def test_one_process_gathers_what_it_has() -> None:
    data = {"x": torch.ones(2)}
    assert machine().gather_for_metrics(data) is data


def test_equal_samples_of_processes_are_different_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = machine()

    def gather(own: Any) -> list[Any]:
        other = ("data", [{"id": 1}])
        return [own, other, other]  # as `Strategy.gather_objects` returns what all have

    monkeypatch.setattr(fabric.strategy, "gather_objects", gather)
    found = gather_samples(fabric, [{"id": 1}])
    for sample in found:
        sample["id"] += 1
    assert found == [{"id": 2}] * 3
