"""What `self.log` makes of several ranks: values against hand computation, no rank waits for another in vain.

Most ranks here are threads of one process that exchange pickled objects; the last tests are real processes with gloo.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from loopwright import Loss
from loopwright.errors import CheckpointError, ModuleError, NonFiniteError
from loopwright.trainer.loop.non_finite import LossWatch
from loopwright.trainer.metrics.metric_objects import load_metric_states, metric_states
from loopwright.trainer.metrics.metrics import Metrics
from loopwright.trainer.state import Progress

torchmetrics = pytest.importorskip("torchmetrics")

EPOCH = {"on_step": False, "on_epoch": True}


class Meeting:
    """Exchanges objects between threads, as pickles, and counts the exchanges."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.exchanges = 0
        self._barrier = threading.Barrier(size)
        self._slots: list[bytes] = [b""] * size

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(obj: Any) -> list[Any]:
            self._slots[rank] = pickle.dumps(obj)
            self._barrier.wait(120)
            everywhere = [pickle.loads(item) for item in self._slots]
            if self._barrier.wait(120) == 0:
                self.exchanges += 1
            return everywhere

        return gather

    def abort(self) -> None:
        self._barrier.abort()


class Rank:
    """One rank: metrics, and a module that may hold metric objects."""

    def __init__(self, rank: int, meeting: Meeting, module: nn.Module | None = None) -> None:
        self.rank, self.size = rank, meeting.size
        self.module = module
        self.metrics = Metrics()
        self.gather = meeting.gather(rank)
        self.metrics.connect(self.gather, rank=rank, size=meeting.size, module=module)

    def log(self, name: str, value: Any, hook: str = "validation_step", batch: Any = None, **kwargs: Any) -> None:
        self.metrics.table, self.metrics.batch = self.metrics.table_of(hook), batch
        self.metrics.log(name, value, **kwargs)
        self.metrics.table, self.metrics.batch = self.metrics.nowhere, None

    def finish(self, stage: str = "validation", step: int = 7) -> dict[str, float]:
        self.metrics.publish_epoch(stage, step)
        return self.metrics.finish_epoch(stage, step)[1]


def on_ranks(
    function: Callable[[Rank], Any], size: int = 2, module: Callable[[], nn.Module] | None = None
) -> tuple[list[Any], Meeting]:
    """Run the function on each rank and return the results; an error of any rank is raised."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = function(Rank(rank, meeting, None if module is None else module()))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, ModuleError | NonFiniteError):  # those are to be raised by every rank by itself
                meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    unexpected = [
        r for r in results if isinstance(r, BaseException) and not isinstance(r, ModuleError | NonFiniteError)
    ]
    if unexpected:
        raise unexpected[0]
    return results, meeting


def values_of(function: Callable[[Rank], Any], size: int = 2, module: Callable[[], nn.Module] | None = None) -> Any:
    """Return what every rank got, which must be the same."""
    results, _ = on_ranks(function, size, module)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert all(str(result) == str(results[0]) for result in results), results  # as text: NaN is not equal to itself
    return results[0]


# --- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync_dist", [False, True])
@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", (1 * 4 + 2 * 4 + 7 * 1) / 9), ("sum", 10.0), ("min", 1.0), ("max", 7.0)]
)
def test_an_epoch_is_that_of_all_ranks_whatever_sync_dist_says(
    reduce_fx: str, expected: float, sync_dist: bool
) -> None:
    batches = [[(1.0, 4), (2.0, 4)], [(7.0, 1)], []]  # the last rank has no batch

    def evaluate(rank: Rank) -> dict[str, float]:
        for value, size in batches[rank.rank]:
            rank.log("x", torch.tensor(value), batch=torch.zeros(size, 2), reduce_fx=reduce_fx, sync_dist=sync_dist)
        return rank.finish()

    assert values_of(evaluate, 3) == {"x": pytest.approx(expected, rel=1e-7)}


@pytest.mark.parametrize("value", [1.0, 1, torch.tensor(1.0), torch.tensor(1), Loss(torch.tensor(3.0), 3.0)])
def test_a_constant_one_is_exactly_one_on_uneven_ranks(value: Any) -> None:
    sizes = [[5, 5, 3], [5, 1], []]

    def evaluate(rank: Rank) -> dict[str, float]:
        for size in sizes[rank.rank]:
            rank.log("x", value, batch=torch.zeros(size))
        return rank.finish()

    assert values_of(evaluate, 3) == {"x": 1.0}


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_integers_are_added_exactly(kind: Any) -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        rank.log("tokens", kind(2**40 + rank.rank), reduce_fx="sum")
        return rank.finish()

    assert values_of(evaluate, 3) == {"tokens": float(3 * 2**40 + 3)}


def test_a_value_that_is_equal_on_all_ranks_keeps_its_bits() -> None:
    value = torch.rand(())

    def evaluate(rank: Rank) -> Tensor:
        rank.log("x", value, hook="on_validation_epoch_end")
        rank.finish()
        return rank.metrics.results["x"]

    results, _ = on_ranks(evaluate, 3)
    assert all(torch.equal(result, value) and result.dtype == torch.float32 for result in results)


def test_an_epoch_of_a_training_with_steps_has_both_keys_on_every_rank() -> None:
    def train(rank: Rank) -> dict[str, Any]:
        rank.metrics.window = 1
        if rank.rank == 1:  # logged on one rank only
            rank.log("x", 4.0, "training_step", torch.zeros(2), on_step=True, on_epoch=True, prog_bar=True)
        return {**rank.finish("train", 3), "bar": rank.metrics.progress_bar, "steps": rank.metrics.result_steps}

    assert values_of(train) == {"x_epoch": 4.0, "bar": {"x_epoch": 4.0, "x": 4.0}, "steps": {"x_epoch": 3, "x": 3}}


def test_keys_of_some_ranks_or_some_batches_only_are_joined_in_the_order_of_ranks() -> None:
    def evaluate(rank: Rank) -> list[tuple[str, float]]:
        if rank.rank == 0:
            rank.log("b", 1.0)
        if rank.rank == 2:
            rank.log("a", 2.0)
            rank.log("a", 4.0)
        if rank.rank != 1:
            rank.log("c", float(rank.rank), reduce_fx="max")
        return list(rank.finish().items())

    assert values_of(evaluate, 3) == [("b", 1.0), ("c", 2.0), ("a", 3.0)]


def test_a_weight_of_zero_everywhere_is_no_number_as_in_one_process() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        rank.log("x", torch.tensor(3.0), batch_size=0)
        return rank.finish()

    assert math.isnan(values_of(evaluate)["x"])


def test_nan_on_one_rank_is_seen_by_all() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        for name in ("min", "max", "sum", "mean"):
            rank.log(name, math.nan if rank.rank else 1.0, reduce_fx=name)
        return rank.finish()

    assert all(math.isnan(value) for value in values_of(evaluate).values())


def test_several_loaders_have_stable_names_also_where_one_is_empty_on_a_rank() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        for loader in range(3):
            rank.metrics.select_loader("validation", loader, several=True)
            if (rank.rank, loader) != (1, 1):
                rank.log("x", float(loader + rank.rank))
        return rank.finish()

    assert values_of(evaluate) == {"x/dataloader_idx_0": 0.5, "x/dataloader_idx_1": 1.0, "x/dataloader_idx_2": 2.5}


def test_weights_that_are_unknown_and_differ_over_ranks_are_an_error_that_names_the_key_on_every_rank() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        batch = {"table": torch.zeros(7, 2), "x": torch.zeros(3 + rank.rank, 2)}  # does not say what its size is
        rank.log("x", torch.tensor(1.0), batch=batch)
        return rank.finish()

    results, _ = on_ranks(evaluate)
    assert all(isinstance(result, ModuleError) for result in results)
    assert "log('x')" in str(results[1])
    assert "batch_size=n" in str(results[1])


def test_one_key_logged_in_two_ways_is_an_error_that_names_the_ranks() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        rank.log("x", 1.0, hook="validation_step" if rank.rank else "on_validation_epoch_end")
        return rank.finish()

    results, _ = on_ranks(evaluate, 3)
    assert all(isinstance(result, ModuleError) and "on ranks [1, 2]" in str(result) for result in results)


@pytest.mark.parametrize("everywhere", [True, False])
def test_rank_zero_only_is_the_value_of_rank_zero(everywhere: bool) -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        if everywhere or rank.rank == 0:
            rank.log("x", 5.0 + rank.rank, rank_zero_only=True, sync_dist=True)
        return rank.finish()

    assert values_of(evaluate, 3) == {"x": 5.0}


# --- how often ranks meet --------------------------------------------------------------------------------------------


def test_all_keys_of_an_epoch_take_one_exchange() -> None:
    def evaluate(rank: Rank) -> None:
        rank.metrics.late_listeners["validation"] = False
        for number in range(20):
            rank.log(f"x{number}", float(number))
        rank.finish()

    _, meeting = on_ranks(evaluate, 3)
    assert meeting.exchanges == 1


def test_what_a_hook_logs_on_one_rank_at_the_end_of_the_epoch_reaches_all() -> None:
    def evaluate(rank: Rank) -> dict[str, Any]:
        metrics = rank.metrics
        metrics.late_listeners["validation"] = rank.rank == 1  # the others have no such hook
        rank.log("x", 1.0 + rank.rank)
        metrics.publish_epoch("validation", 1)
        published = metrics.callback_metrics()["x"].item()
        if rank.rank == 1:
            rank.log("late", 4.0, hook="on_validation_epoch_end")
            rank.log("x", 9.0)
        return {"published": published, **metrics.finish_epoch("validation", 1)[1]}

    assert values_of(evaluate) == {"published": 1.5, "x": 4.0, "late": 4.0}


def test_the_next_epoch_begins_anew_and_a_discarded_one_leaves_no_trace() -> None:
    def evaluate(rank: Rank) -> list[dict[str, float]]:
        rank.log("x", 100.0)
        rank.metrics.publish_epoch("validation", 0)
        rank.metrics.discard_epoch("validation")
        assert rank.metrics.callback_metrics() == {}
        found = []
        for epoch in range(2):
            if rank.rank or epoch:
                rank.log("x", float(epoch + rank.rank))
            found.append(rank.finish())
        return found

    assert values_of(evaluate) == [{"x": 1.0}, {"x": 1.5}]


# --- steps -----------------------------------------------------------------------------------------------------------


def test_step_values_are_those_of_all_ranks_with_sync_dist_and_of_rank_zero_without() -> None:
    def step(rank: Rank) -> dict[str, Any]:
        metrics, size = rank.metrics, [3, 1][rank.rank]
        metrics.window = 5
        batch, value = torch.zeros(size), torch.tensor(float(rank.rank))
        rank.log("own", value, "training_step", batch, prog_bar=True)
        rank.log("mean", value, "training_step", batch, sync_dist=True)
        rank.log("sum", value + 1, "training_step", batch, sync_dist=True, reduce_fx="sum")
        rank.log("max", rank.rank, "training_step", batch, sync_dist=True, reduce_fx="max")
        rank.log("zero", rank.rank, "training_step", batch, sync_dist=True, rank_zero_only=True)
        row, _ = metrics.read_step()
        seen = metrics.callback_metrics()
        assert seen["mean"].item() == 0.25
        assert seen["own"].item() == rank.rank
        return {**row, "bar": metrics.progress_bar}

    expected = {"own": 0.0, "mean": 0.25, "sum": 3.0, "max": 1.0, "zero": 0.0, "bar": {"own": 0.0}}
    assert values_of(step) == expected


def test_a_window_of_several_batches_weighs_as_much_as_its_batches() -> None:
    sizes = [[4, 4], [2]]

    def step(rank: Rank) -> dict[str, float]:
        rank.metrics.window = 1
        for index, size in enumerate(sizes[rank.rank]):
            value = torch.tensor(10.0 * rank.rank + index)
            rank.log("x", value, "training_step", torch.zeros(size), sync_dist=True)
        return rank.metrics.read_step()[0]

    assert values_of(step) == {"x": pytest.approx((0 * 4 + 1 * 4 + 10 * 2) / 10)}


def test_a_window_in_which_nothing_counts_on_one_rank_is_that_of_the_others() -> None:
    def step(rank: Rank) -> dict[str, float]:
        rank.metrics.window = 1
        for _ in range(2):
            rank.log("x", Loss(torch.tensor(6.0 * rank.rank), torch.tensor(2.0 * rank.rank)), "training_step",
                     torch.zeros(3), sync_dist=True)  # fmt: skip
        return rank.metrics.read_step()[0]

    assert values_of(step) == {"x": 3.0}


def test_a_rank_that_logged_nothing_in_this_step_does_not_keep_the_others_waiting() -> None:
    def step(rank: Rank) -> dict[str, float]:
        rank.metrics.window = 1
        if rank.rank == 1:
            rank.log("x", 3.0, "training_step", sync_dist=True)
            rank.log("own", 4.0, "training_step")
        return rank.metrics.read_step()[0]

    assert values_of(step, 3) == {"x": 3.0, "own": 4.0}


def test_an_evaluation_reads_its_own_steps_without_the_others() -> None:
    def evaluate(rank: Rank) -> None:
        for window in range(rank.rank + 1):  # ranks have different numbers of batches
            rank.metrics.window = window
            rank.log("x", float(rank.rank), on_step=True, sync_dist=True)
            assert rank.metrics.read_step(on_all_ranks=False)[0] == {"x_step": float(rank.rank)}

    _, meeting = on_ranks(evaluate)
    assert meeting.exchanges == 0


def test_a_value_that_is_not_finite_on_one_rank_is_reported_to_all() -> None:
    def step(rank: Rank) -> float:
        return rank.metrics.read_step(torch.tensor(math.inf if rank.rank == 1 else 2.0))[1]

    assert all(math.isnan(result) for result in on_ranks(step, 3)[0])


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
@pytest.mark.filterwarnings("ignore:The training loss was nan at batch 3 of rank 2")
def test_a_loss_that_is_not_finite_on_one_rank_has_the_same_effect_on_all(policy: str) -> None:
    def step(rank: Rank) -> Any:
        watch = LossWatch(policy)
        watch.gather = rank.gather
        # One rank skipped its batches; the next loss of another is a consequence.
        losses = {0: [], 1: [1.0, 1.0, math.nan], 2: [1.0, math.nan, 2.0]}[rank.rank]
        watch.losses.extend(torch.tensor(loss) for loss in losses)
        progress = Progress(steps=2, total_batches=5)
        watch.judge(rank.metrics.read_step(watch.probe())[1], progress)
        assert watch.losses == []
        watch.look(progress)  # nothing is left to be found

    results, _ = on_ranks(step, 3)
    if policy != "raise":
        assert results == [None] * 3
        return
    assert [str(result) for result in results] == [str(results[0])] * 3
    assert isinstance(results[0], NonFiniteError)
    assert "nan at batch 3 of rank 2" in str(results[0])


# --- metric objects --------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Holds metric objects of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.cat = torchmetrics.CatMetric()
        self.auroc = torchmetrics.AUROC(task="binary")
        self.pearson = torchmetrics.PearsonCorrCoef()
        self.ratio = torchmetrics.SumMetric() / torchmetrics.SumMetric()
        self.most = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())["max"]  # a composition of a wrapper
        self.group = torchmetrics.MetricCollection(
            [torchmetrics.classification.BinaryPrecision(), torchmetrics.classification.BinaryRecall()]
        )


def shares(size: int, count: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return uneven shares of batches, the last rank's empty, of one data set."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.rand(4, generator=generator), torch.randint(0, 2, (4,), generator=generator)) for _ in range(count)]
    dealt: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]
    for index, batch in enumerate(data):
        dealt[0 if index < 3 else index % max(size - 1, 1)].append(batch)
    return dealt


def log_objects(rank: Rank, batches: list[tuple[Tensor, Tensor]], *, logs: bool = True) -> None:
    module: Any = rank.module
    for preds, target in batches:
        module.mean.update(preds)
        module.auroc.update(preds, target)
        module.pearson.update(preds, target.float())
        module.ratio.update(preds)
        module.most.update(preds)
        module.group.update(preds, target)
        if logs:
            for name in ("mean", "auroc", "pearson", "ratio", "most"):
                rank.log(name, getattr(module, name))
            for name, metric in module.group.items():
                rank.log(name, metric)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("logging_ranks", ["all", "first"])
def test_metric_objects_compute_the_value_of_one_process_and_no_rank_waits(size: int, logging_ranks: str) -> None:
    dealt = shares(size, 8)

    def evaluate(rank: Rank) -> dict[str, float]:
        log_objects(rank, dealt[rank.rank], logs=logging_ranks == "all" or rank.rank == 0)
        return rank.finish()

    single = Rank(0, Meeting(1), Holder())
    log_objects(single, [batch for share in dealt for batch in share])
    expected = single.finish()
    assert len(expected) == 7
    assert values_of(evaluate, size, Holder) == {
        name: pytest.approx(value, rel=1e-5) for name, value in expected.items()
    }


def test_metric_objects_begin_anew_also_on_a_rank_that_did_not_log_them() -> None:
    def evaluate(rank: Rank) -> list[float]:
        module: Any = rank.module
        found = []
        for epoch in range(2):
            module.mean.update(torch.tensor(float(epoch + rank.rank)))
            if rank.rank == 0:
                rank.log("x", module.mean)
            rank.metrics.publish_epoch("validation", 1)
            assert module.mean._update_count == 1  # its own again: more may follow
            found.append(rank.metrics.finish_epoch("validation", 1)[1]["x"])
        return found

    assert values_of(evaluate, 2, Holder) == [0.5, 1.5]


def test_the_users_own_compute_after_the_end_is_that_of_all_ranks() -> None:
    def evaluate(rank: Rank) -> float:
        module: Any = rank.module
        module.mean.update(torch.tensor(float(rank.rank)))
        rank.log("x", module.mean)
        rank.metrics.publish_epoch("validation", 1)
        value: float = module.mean.compute().item()
        rank.metrics.finish_epoch("validation", 1)
        return value

    assert values_of(evaluate, 2, Holder) == 0.5


def test_a_list_of_uneven_lengths_is_joined_in_the_order_of_ranks() -> None:
    class Last(torchmetrics.CatMetric):  # type: ignore[misc, name-defined]
        def compute(self) -> Tensor:
            return super().compute()[-1]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = Last()

    def evaluate(rank: Rank) -> dict[str, float]:
        module: Any = rank.module
        for number in range([1, 3, 0][rank.rank]):
            module.last.update(torch.tensor(float(10 * rank.rank + number)))
        rank.log("x", module.last)
        return rank.finish()

    assert values_of(evaluate, 3, Own) == {"x": 12.0}


def test_an_object_that_only_some_ranks_have_is_an_error_that_names_the_others() -> None:
    def evaluate(rank: Rank) -> dict[str, float]:
        if rank.rank == 0:
            metric = torchmetrics.MeanMetric()
            metric.update(1.0)
            rank.log("x", metric)
        return rank.finish()

    results, _ = on_ranks(evaluate, 3, nn.Module)
    assert all(isinstance(result, ModuleError) and "ranks [1, 2]" in str(result) for result in results)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def train_part(rank: Rank, values: list[float], objects: bool = True) -> None:
    for value in values:
        rank.log("x", torch.tensor(value), "training_step", torch.zeros(3), **EPOCH)
        rank.log("least", value, "training_step", reduce_fx="min", **EPOCH)
        if objects and rank.module is not None:
            module: Any = rank.module
            module.mean.update(torch.tensor(value))
            rank.log("object", module.mean, "training_step", **EPOCH)


def saved(values: list[list[float]]) -> Any:
    def save(rank: Rank) -> Any:
        train_part(rank, values[rank.rank])
        assert rank.module is not None
        return pickle.dumps((rank.metrics.state_dict(rank.module), rank.metrics.of_ranks(metric_states(rank.module))))

    return pickle.loads(on_ranks(save, len(values), Holder)[0][0])


def resumed(state: Any, values: list[list[float]]) -> Callable[[Rank], dict[str, float]]:
    def go_on(rank: Rank) -> dict[str, float]:
        assert rank.module is not None
        load_metric_states(rank.module, state[1], torch.device("cpu"), rank.metrics.place)
        rank.metrics.load_state_dict(state[0], rank.module)
        train_part(rank, values[rank.rank])
        return rank.finish("train")

    return go_on


def whole(values: list[list[float]]) -> Callable[[Rank], dict[str, float]]:
    def train(rank: Rank) -> dict[str, float]:
        train_part(rank, values[rank.rank])
        return rank.finish("train")

    return train


FIRST = [[0.1, 0.7, 0.3], [1.1, 0.05]]
SECOND = [[0.33, 0.9], [0.21]]


def test_a_resumed_epoch_has_the_same_bits_on_as_many_ranks() -> None:
    expected = values_of(whole([first + second for first, second in zip(FIRST, SECOND, strict=True)]), 2, Holder)
    assert values_of(resumed(saved(FIRST), SECOND), 2, Holder) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_epoch_has_the_same_value_on_another_number_of_ranks(size: int) -> None:
    rest = [[0.33, 0.9, 0.21], [], []][:size] if size == 1 else [[0.33], [0.9], [0.21]]
    expected = values_of(whole([first + second for first, second in zip(FIRST, SECOND, strict=True)]), 2, Holder)
    found = values_of(resumed(saved(FIRST), rest), size, Holder)
    assert found == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_one_process_resumes_what_ranks_saved_and_the_reverse() -> None:
    expected = values_of(whole([first + second for first, second in zip(FIRST, SECOND, strict=True)]), 2, Holder)
    approximately = {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
    module, metrics = Holder(), Metrics()
    state = saved(FIRST)
    load_metric_states(module, state[1], torch.device("cpu"))
    metrics.load_state_dict(state[0], module)
    single = Rank(0, Meeting(1), module)
    single.metrics = metrics
    train_part(single, [value for values in SECOND for value in values])
    assert single.finish("train") == approximately

    module, single = Holder(), Rank(0, Meeting(1), Holder())
    single.metrics, single.module = Metrics(), module
    train_part(single, [value for values in FIRST for value in values])
    state = (single.metrics.state_dict(module), metric_states(module))
    assert values_of(resumed(state, SECOND), 2, Holder) == approximately


def test_a_checkpoint_of_a_rank_that_is_alone_asks_nobody() -> None:
    def save(rank: Rank) -> dict[str, Any]:
        train_part(rank, FIRST[rank.rank], objects=False)
        return rank.metrics.state_dict(rank.module, alone=True)

    results, meeting = on_ranks(save)
    assert meeting.exchanges == 0
    assert "ranks" not in results[0]


def test_a_metric_whose_states_cannot_be_joined_says_so_on_another_number_of_ranks() -> None:
    def save(rank: Rank) -> Any:
        module: Any = rank.module
        module.pearson.update(torch.rand(4), torch.rand(4))
        return rank.metrics.of_ranks(metric_states(module))

    states = on_ranks(save, 2, Holder)[0][0]
    with pytest.raises(CheckpointError, match=r"metric 'pearson' .* of 2 ranks"):
        load_metric_states(Holder(), states, torch.device("cpu"))
    load_metric_states(Holder(), states, torch.device("cpu"), (2, 3))  # another rank of three begins empty


# --- processes -------------------------------------------------------------------------------------------------------


def _gather_objects(rank: int, size: int) -> Callable[[Any], list[Any]]:
    def gather(obj: Any) -> list[Any]:
        everywhere: list[Any] = [None] * size
        torch.distributed.all_gather_object(everywhere, obj)
        return everywhere

    return gather


def evaluate_in_process(rank: int, size: int) -> dict[str, Any]:
    module: Any = Holder()
    one = Rank(rank, Meeting(size), module)
    one.metrics.connect(_gather_objects(rank, size), rank=rank, size=size, module=module)
    for preds, target in shares(size, 8)[rank]:
        one.log("loss", preds.mean(), batch=preds)
        module.auroc.update(preds, target)
        one.log("auroc", module.auroc)
    if rank == 0:
        one.log("zero", 1.0, rank_zero_only=True)
    return one.finish()


def test_processes_agree_on_an_evaluation() -> None:
    results = run_ranks(evaluate_in_process, 3)
    batches = [batch for share in shares(3, 8) for batch in share]
    auroc = torchmetrics.AUROC(task="binary")
    for batch in batches:
        auroc.update(*batch)
    mean = sum(preds.double().sum().item() for preds, _ in batches) / 32
    assert results[0] == results[1] == results[2]
    assert results[0] == {
        "loss": pytest.approx(mean, rel=1e-6),
        "auroc": pytest.approx(auroc.compute().item()),
        "zero": 1.0,
    }
