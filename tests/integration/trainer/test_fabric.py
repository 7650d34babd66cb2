"""Fabric on several processes: a handwritten loop equals one process, evaluation is exact, errors reach every rank."""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from loopwright.errors import LaunchError, ModuleError
from loopwright.fabric import Fabric, rng_state, set_rng_state
from loopwright.strategies.ddp.strategy import DDPStrategy

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


def machine(size: int, **options: Any) -> Fabric:
    """Return a Fabric for as many processes as there are; for one, on a single device."""
    precision = options.pop("precision", None)
    strategy = DDPStrategy(**options) if size > 1 else "auto"
    return Fabric(accelerator="cpu", strategy=strategy, devices=size, precision=precision)


class Net(nn.Module):
    """A network with running statistics, which DDP broadcasts in forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output if self.training else self.norm(output)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).pow(2).mean()


# -- training --------------------------------------------------------------------------------------------------------


def train(rank: int, size: int, steps: int, precision: str) -> dict[str, Any]:
    torch.manual_seed(0 if rank == 0 else 77)  # another beginning on rank 1, which setup makes equal
    fabric, net = machine(size, precision=precision), Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=4 // size, shuffle=True))  # type: ignore[arg-type]
    torch.manual_seed(5 + rank)  # samplers draw from rank 0's
    synced = []
    for _ in range(2):
        for batch in loader:
            with fabric.accumulate(model, steps=steps):
                fabric.backward(model(batch).pow(2).mean())
                if fabric.sync_gradients:
                    fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            synced.append(fabric.sync_gradients)
    return {
        "weights": {k: v.clone() for k, v in net.state_dict().items()},
        "synced": synced,
        "steps": optimizer.num_steps,
    }


@pytest.mark.parametrize(("steps", "precision"), [(1, "32-true"), (4, "32-true"), (2, "bf16-mixed"), (2, "16-mixed")])
def test_a_loop_on_two_ranks_gives_the_weights_of_one(steps: int, precision: str) -> None:
    alone = train(0, 1, steps, precision)
    both = run_ranks(train, 2, steps, precision, connect=False)
    # Means of halves are added in another order; 16-bit products round each row as it stands, so that they agree, too.
    tolerance = 1e-6 if precision == "32-true" else 1e-3
    for result in both:
        assert result["synced"] == alone["synced"]
        assert result["steps"] == alone["steps"]
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=tolerance)
    for name, value in both[0]["weights"].items():
        assert torch.equal(value, both[1]["weights"][name]), name


def count_reductions(rank: int, size: int) -> tuple[int, int]:
    reduced = []

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are strings
        reduced.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    fabric, net = machine(size, ddp_comm_hook=count), Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in fabric.setup_dataloaders(DataLoader(DATA, batch_size=4)):  # type: ignore[arg-type]
        with fabric.accumulate(model, steps=2):
            fabric.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.num_steps, len(reduced)


def test_gradients_are_reduced_once_per_window_also_in_a_short_one() -> None:
    assert run_ranks(count_reductions, 2, connect=False) == [(2, 2)] * 2  # 3 batches per rank: windows of 2 and of 1


def unseen_forward(rank: int, size: int) -> str:
    fabric, net = machine(size), Net()
    model = fabric.setup(net)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    with pytest.raises(ModuleError) as caught:
        model.loss(DATA[:2])
    model.mark_forward_method("loss")
    fabric.backward(model.loss(DATA[rank : rank + 1]))
    gradient = net.layers[0].weight.grad
    assert gradient is not None
    assert fabric.all_gather(gradient).std(dim=0).max() == 0
    return str(caught.value)


def test_a_method_that_ddp_does_not_see_is_an_error_until_it_is_marked() -> None:
    for text in run_ranks(unseen_forward, 2, connect=False):
        assert "Net.loss ran a forward pass outside DDPStrategy" in text


class Skips(Net):
    """A module whose rank 1 finds nothing to learn in its batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx else self.loss(batch)


def skip(rank: int, size: int) -> Tensor:
    fabric = machine(size)
    torch.manual_seed(0)
    net = Skips()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model.training_step(DATA[:4], rank))
    optimizer.step()
    return net.layers[0].weight.detach()


def test_a_rank_whose_step_returns_none_takes_part() -> None:
    one, two = run_ranks(skip, 2, connect=False)
    assert torch.equal(one, two)
    torch.manual_seed(0)
    net = Skips()
    (net.loss(DATA[:4]) / 2).backward()
    with torch.no_grad():
        expected = net.layers[0].weight - 0.1 * net.layers[0].weight.grad
    torch.testing.assert_close(one, expected)


def launched(fabric: Fabric, number: int) -> dict[str, Any]:
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(DATA[fabric.global_rank :: 2]).mean())
    optimizer.step()
    total = fabric.all_reduce(fabric.global_rank + number, reduce_op="sum")
    return {"total": int(total), "weight": net.layers[0].weight.detach(), "again": fabric.launch(lambda fabric: number)}


class Job(Fabric):
    """A program that starts its processes when it is run."""

    def run(self, number: int) -> Any:
        """Do the same."""
        return launched(self, number)


def test_processes_that_are_forked_bring_back_what_rank_zero_returned() -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp_fork", devices=2)
    result = fabric.launch(launched, 3)
    assert (result["total"], result["again"]) == (7, 3)
    assert result["weight"].shape == (4, 3)
    with pytest.raises(LaunchError, match="Expected Fabric.launch before"):
        fabric.barrier()
    assert Job(accelerator="cpu", strategy="ddp_fork", devices=2).run(4)["total"] == 9


# -- data ------------------------------------------------------------------------------------------------------------


def read(rank: int, size: int, samples: int, batch_size: int, uneven: str | None) -> tuple[list[list[int]], int]:
    fabric = machine(size)
    loader = fabric.setup_dataloaders(DataLoader(range(samples), batch_size=batch_size), uneven=uneven)  # type: ignore[arg-type]
    return [batch.tolist() for batch in loader], len(loader)


@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        (None, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("stop_all", [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ("cycle", [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0, 1]]]),
        ("keep", [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
    ],
)
def test_batches_are_sharded_over_ranks(uneven: str | None, expected: Any) -> None:
    results = run_ranks(read, 2, 9, 2, uneven, connect=False)
    assert [batches for batches, _ in results] == expected
    assert [length for _, length in results] == [len(batches) for batches in expected]


class Own(IterableDataset[Tensor]):
    """Each rank's own data."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA[: self.count])


def read_own(rank: int, size: int, counts: list[int]) -> tuple[int, int, int]:
    fabric = machine(size)
    loader = fabric.setup_dataloaders(DataLoader(Own(counts[rank]), batch_size=1))
    trained = sum(1 for _ in loader)
    with torch.no_grad():
        evaluated = [fabric.gather_for_metrics(batch).shape[0] for batch in loader]
    return trained, len(evaluated), sum(evaluated)


def test_iterables_of_unequal_lengths_end_together_in_training_and_by_themselves_in_evaluation() -> None:
    assert run_ranks(read_own, 2, [5, 2], connect=False) == [(2, 5, 7), (2, 2, 4)]


def evaluate(rank: int, size: int, samples: int, batch_size: int) -> list[list[int]]:
    fabric, net = machine(size), Net()
    model = fabric.setup(net).eval()
    loader = fabric.setup_dataloaders(DataLoader(range(samples), batch_size=batch_size))  # type: ignore[arg-type]
    in_rounds, mine, with_break = [], [], []
    with torch.no_grad():
        for batch in loader:
            model(batch[:, None].float().expand(-1, 3))  # does not communicate, though there are buffers
            in_rounds += fabric.gather_for_metrics({"number": batch})["number"].tolist()
            mine += batch.tolist()
        after = fabric.gather_for_metrics(torch.tensor(mine))
        for number, batch in enumerate(loader):
            with_break += fabric.gather_for_metrics(batch).tolist()
            if number == (samples // batch_size) // size:
                break
        alone = sum(len(batch) for batch in loader)
    total = int(fabric.all_reduce(alone, reduce_op="sum"))
    assert total == samples
    return [in_rounds, sorted(after.tolist()), with_break]


@pytest.mark.parametrize(("samples", "batch_size"), [(8, 2), (7, 2), (5, 2), (3, 4), (1, 1), (6, 1)])
def test_evaluation_sees_every_sample_once_and_gathers_in_order(samples: int, batch_size: int) -> None:
    results = run_ranks(evaluate, 2, samples, batch_size, connect=False)
    everything = list(range(samples))
    rank_of_last_batch = ((samples - 1) // batch_size) % 2
    assert results[rank_of_last_batch][0] == everything
    for _, after, _ in results:
        assert after == everything
    assert results[0][2] == everything[: len(results[0][2])]


def shuffle(rank: int, size: int) -> list[int]:
    fabric = machine(size)
    torch.manual_seed(rank)
    with torch.no_grad():
        loader = fabric.setup_dataloaders(DataLoader(range(10), shuffle=True))  # type: ignore[arg-type]
        return [int(batch) for batch in loader]


def test_a_shuffled_evaluation_reads_one_order_on_all_ranks() -> None:
    one, two = run_ranks(shuffle, 2, connect=False)
    assert sorted(one + two) == list(range(10))


def go_on(rank: int, size: int, path: str, is_first: bool) -> list[list[int]]:
    fabric, net = machine(size), Net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(range(24), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "rng": None, "step": 0}
    if not is_first:
        torch.manual_seed(99)
        fabric.load(path, state)
        set_rng_state(state["rng"])
        assert state["step"] == 2
    else:
        torch.manual_seed(0)
    seen = []
    for step, batch in enumerate(loader, 1):
        fabric.backward(model(batch[:, None].float().expand(-1, 3)).mean())
        optimizer.step()
        seen.append(batch.tolist())
        if is_first and step == 2:
            fabric.save(path, {**state, "rng": rng_state(), "step": step})
            break
    return seen


@pytest.mark.parametrize("later", [1, 2, 4])
def test_a_saved_epoch_goes_on_with_each_sample_once_on_any_number_of_ranks(later: int, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    before = run_ranks(go_on, 2, path, True, connect=False)
    after = run_ranks(go_on, later, path, False, connect=False)
    samples = [sample for rank in (*before, *after) for batch in rank for sample in batch]
    assert sorted(samples) == list(range(24))


def drop(rank: int, size: int, path: str, strategy: str, saves: bool) -> list[float]:
    """Train with dropout masks of each rank; save after two steps, or load what was saved there."""
    fabric = Fabric(accelerator="cpu", strategy=strategy if size > 1 else "auto", devices=size)
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(3, 16), nn.Dropout(), nn.Linear(16, 1))
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=1, shuffle=True))  # type: ignore[arg-type]
    fabric.seed_everything(10 + rank, verbose=False)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "own": {"rng": rng_state()}}
    if not saves:
        fabric.load(path, state)
        set_rng_state(state["own"]["rng"])
    for step, batch in enumerate(loader, 1 if saves else 3):
        fabric.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if saves and step == 2:
            fabric.save(path, {**state, "own": {"rng": rng_state()}})
        if step == 5:
            break
    full = fabric.strategy.module_state_dict(model._without_fabric)
    weights = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in full.values()]
    return [number for value in weights for number in value.flatten().tolist()] + [torch.rand(1).item()]


@pytest.mark.parametrize(("size", "strategy"), [(1, "auto"), (2, "ddp"), (3, "ddp"), (2, "fsdp")])
def test_each_rank_continues_with_its_own_random_numbers(size: int, strategy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    straight = run_ranks(drop, size, path, strategy, True, connect=False)
    resumed = run_ranks(drop, size, path, strategy, False, connect=False)
    assert resumed == straight
    assert len({weights[-1] for weights in straight}) == size


def draw(rank: int, size: int) -> list[tuple[str, tuple[float, float, float]]]:
    """Return what each generator would draw after each call; nothing else here draws on one rank only."""
    fabric, seen = machine(size), []

    def note(call: str) -> None:
        before = rng_state()
        seen.append((call, (torch.rand(1).item(), random.random(), float(numpy.random.rand()))))
        set_rng_state(before)

    fabric.seed_everything(3, verbose=False)
    with fabric.init_module():
        net = Net()
    note("init_module")
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    note("setup")
    shuffled = DataLoader(DATA, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    loaders = {
        "shuffled": shuffled,
        "persistent": DataLoader(range(8), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),  # type: ignore[arg-type]
        "iterable": DataLoader(Uneven(4 + rank), batch_size=2),
        "several": {"a": shuffled, "b": DataLoader(range(8), shuffle=True), "c": DataLoader(Uneven(2 + rank))},  # type: ignore[arg-type]
        "batches": [DATA[:2]] * 4,
    }
    for name, loader in loaders.items():
        for uneven in ("stop_all", "cycle"):
            ready = fabric.setup_dataloaders(loader, uneven=uneven)
            for number in range(2):
                for _ in ready:
                    note(f"{name}, {uneven}, pass {number}")
                note(f"{name}, {uneven}, end of pass {number}")
        with torch.no_grad():
            list(fabric.setup_dataloaders(loader))
        if name == "several":  # members start over at different times on each rank, and draw then
            fabric.seed_everything(4, verbose=False)
        note(f"{name}, evaluation")
    loader = fabric.setup_dataloaders(shuffled)
    for batch in loader:
        fabric.backward(model(batch).mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        break
    note("step")
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    path = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(f"{path}/a.ckpt", state)
    note("save")
    fabric.load(f"{path}/a.ckpt", state)
    next(iter(loader))
    note("load")
    fabric.gather_for_metrics(torch.ones(rank))
    note("gather")
    fabric.barrier()
    shutil.rmtree(path, ignore_errors=True)
    return seen


class Uneven(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.count, 3))


def test_generators_of_all_ranks_stay_alike() -> None:
    first, *others = run_ranks(draw, 3, connect=False)
    for other in others:
        for (call, one), (_, two) in zip(first, other, strict=True):
            assert one == two, call


def test_forked_processes_continue_with_the_generators_of_the_program() -> None:
    random.seed(7)
    state = random.getstate()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    assert fabric.launch(_drawn_everywhere) == [random.random()] * 2
    random.setstate(state)


def _drawn_everywhere(fabric: Fabric) -> list[float]:
    drawn: list[float] = fabric.strategy.gather_objects(random.random())
    return drawn


# -- together --------------------------------------------------------------------------------------------------------


def communicate(rank: int, size: int) -> None:
    fabric = machine(size)
    assert (fabric.global_rank, fabric.world_size, fabric.is_global_zero) == (rank, size, rank == 0)
    fabric.barrier("here")
    assert fabric.broadcast({"from": rank}) == {"from": 0}
    assert fabric.broadcast(rank, src=1) == 1
    assert fabric.all_gather({"a": torch.full((2,), rank)})["a"].tolist() == [[0, 0], [1, 1]]
    assert fabric.all_gather(rank).tolist() == [0, 1]
    assert fabric.all_reduce(torch.tensor([float(rank)])).item() == 0.5
    assert fabric.all_reduce(rank, reduce_op="sum").item() == 1
    assert fabric.gather_for_metrics(torch.arange(rank + 1)).tolist() == [0, 0, 1]
    assert fabric.gather_for_metrics(None if rank else ["x"]) == ["x"]
    value = torch.ones(2, requires_grad=True)
    fabric.all_gather(value * (rank + 1), sync_grads=True).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2 * (rank + 1)] * 2


def test_collectives() -> None:
    run_ranks(communicate, 2, connect=False)


class Records:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics)


def log(rank: int, size: int) -> list[Any]:
    logger = Records()
    fabric = Fabric(accelerator="cpu", strategy=DDPStrategy(), devices=size, loggers=logger)
    fabric.launch(lambda fabric: fabric.log("rank", rank))
    return logger.rows


def test_rank_zero_logs() -> None:
    assert run_ranks(log, 2, connect=False) == [[{"rank": 0}], []]


def in_turn(rank: int, size: int, folder: str) -> list[str]:
    fabric, errors = machine(size), []
    for local in (False, True):
        file = Path(folder, f"made-{local}")
        with fabric.rank_zero_first(local=local):
            assert file.exists() == (rank > 0)
            file.touch()
        try:
            with fabric.rank_zero_first(local=local):
                assert rank == 0, "rank 1 must not run it"
                raise FileNotFoundError("no such data")
        except FileNotFoundError as error:
            errors.append(f"{error} {getattr(error, '__notes__', '')}")
    return errors


def slow_first(rank: int, size: int) -> bool:
    # Not less: where nobody answers for the name of an address, torch waits 5 s in each connection.
    fabric = machine(size, timeout=8.0)
    with fabric.rank_zero_first():
        if rank == 0:
            time.sleep(9)  # longer than a collective may take
    fabric.barrier()
    return True


@pytest.mark.slow
def test_rank_zero_may_take_longer_than_a_collective() -> None:
    assert run_ranks(slow_first, 2, connect=False) == [True, True]


def test_rank_zero_goes_first_and_its_failure_is_everyones(tmp_path: Path) -> None:
    first, second = run_ranks(in_turn, 2, str(tmp_path), connect=False)
    assert first == ["no such data "] * 2
    assert second == ["no such data ['This was raised on rank 0; all ranks stop.']"] * 2


class Odd(Exception):
    """One that cannot be made again from its arguments."""

    def __init__(self, number: int) -> None:
        super().__init__("text", number, "more")


class Breaks:
    """A checkpoint IO whose disk is full."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise self.error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool = True) -> Any:
        return {"a": 1}


def save(rank: int, size: int, kind: str) -> str:
    error = OSError(28, "No space left on device") if kind == "disk" else Odd(3)
    fabric = machine(size, checkpoint_io=Breaks(error))
    try:
        fabric.save("anywhere", {"a": 1})
    except Exception as caught:
        fabric.barrier()  # the ranks are still with each other
        return f"{type(caught).__name__}: {caught}"
    return "saved"


def test_a_failed_save_is_an_error_on_all_ranks() -> None:
    assert run_ranks(save, 2, "disk", connect=False) == ["OSError: [Errno 28] No space left on device"] * 2
    first, second = run_ranks(save, 2, "odd", connect=False)
    assert first.startswith("Odd: ")
    assert second.startswith("LaunchError: rank 0 raised Odd: ")


def load(rank: int, size: int, path: str) -> str:
    fabric = machine(size)
    if rank == 0:
        fabric.checkpoint_io.save_checkpoint({"a": 1}, path)
    fabric.barrier()
    assert fabric.load(path) == {"a": 1}
    try:
        fabric.load(path if rank == 0 else path + ".missing")  # a file system that only one node sees
    except Exception as caught:
        return f"{type(caught).__name__} {len(getattr(caught, '__notes__', ()))}"
    return "loaded"


def test_a_failed_load_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(load, 2, str(tmp_path / "a.ckpt"), connect=False)
    assert first == second.replace(" 0", " 1") == "CheckpointNotFound 1"


def alive_after_a_loop(rank: int, size: int) -> list[list[str]]:
    """Return which objects exist after two loops, once nothing refers to them; in the second a forward pass fails."""
    fabric = machine(size)
    fabric.launch()

    def loop(*, fails: bool) -> list[Any]:
        original = Net()
        module, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters()))
        for batch in fabric.setup_dataloaders(DataLoader(DATA, batch_size=8)):
            optimizer.zero_grad()
            fabric.backward(module(batch).mean())
            optimizer.step()
        if fails:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                module(torch.ones(2, 5))
        return [weakref.ref(one) for one in (original, module, optimizer, original.layers[0].weight)]

    gc.collect()
    gc.disable()
    return [[type(one()).__name__ for one in loop(fails=fails) if one() is not None] for fails in (False, True)]


def test_what_a_loop_has_dropped_is_freed_at_once() -> None:
    assert run_ranks(alive_after_a_loop, 2, connect=False) == [[[], []]] * 2
