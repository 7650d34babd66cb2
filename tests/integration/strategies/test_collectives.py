"""Collectives on gloo: values, gradients, and what happens where the ranks differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import loopwright as lw
from loopwright.errors import ConfigError, RankFailure
from loopwright.strategies import ParallelStrategy
from loopwright.strategies.ddp.strategy import DDPStrategy


class Pair(NamedTuple):
    x: Any
    y: Any


def connected() -> ParallelStrategy:
    strategy = ParallelStrategy()
    strategy.setup_environment()
    return strategy


def reduce_structures(rank: int, size: int) -> Any:
    strategy = connected()
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    before = x.clone()
    data = {"a": x, "b": Pair(rank, [torch.tensor(rank)]), "text": "stays"}
    results = {op: strategy.all_reduce(data, reduce_op=op) for op in ("mean", "sum", "min", "max", "product")}
    assert torch.equal(x, before), "nothing is changed in place"
    return results


def test_a_structure_is_reduced_by_every_operation_and_nothing_changes_in_place() -> None:
    for result in run_ranks(reduce_structures, 3):
        assert result["mean"]["a"].tolist() == [2, 4]
        assert result["sum"]["a"].tolist() == [6, 12]
        assert result["min"]["a"].tolist() == [1, 2]
        assert result["max"]["a"].tolist() == [3, 6]
        assert result["product"]["a"].tolist() == [6, 48]
        assert result["sum"]["b"].x.item() == 3
        assert isinstance(result["sum"]["b"], Pair)
        assert result["mean"]["b"].y[0].item() == 1
        assert result["sum"]["text"] == "stays"


def reduce_dtypes(rank: int, size: int) -> Any:
    strategy = connected()
    big = 2**53 + 1
    half = torch.full((4,), 1.0 + rank / 128, dtype=torch.bfloat16)
    return {
        "int mean": strategy.all_reduce(torch.tensor([rank, 1])),
        "int sum": strategy.all_reduce(torch.tensor([big, 1], dtype=torch.int64), reduce_op="sum"),
        "int32 sum": strategy.all_reduce(torch.tensor(2**30, dtype=torch.int32), reduce_op="sum"),
        "bool sum": strategy.all_reduce(torch.tensor(True), reduce_op="sum"),
        "bool max": strategy.all_reduce(torch.tensor(rank == 1), reduce_op="max"),
        "bf16": strategy.all_reduce(half),
        "fp16": strategy.all_reduce(torch.tensor(40000.0, dtype=torch.float16)),
        "torch's op": strategy.all_reduce(torch.tensor(2.0), reduce_op=torch.distributed.ReduceOp.SUM),
        "op by position": strategy.reduce(torch.tensor(2.0), "SUM"),
        "slices": strategy.all_reduce(torch.arange(6.0).view(2, 3).t(), reduce_op="sum"),
    }


def test_integers_keep_their_value_and_16_bit_floats_do_not_overflow() -> None:
    result = run_ranks(reduce_dtypes, 2)[1]
    assert result["int mean"].dtype == torch.float64
    assert result["int mean"].tolist() == [0.5, 1.0]
    assert result["int sum"].tolist() == [2**54 + 2, 2]
    assert result["int32 sum"].item() == 2**31
    assert result["bool sum"].item() == 2
    assert result["bool max"].item() is True
    assert result["bf16"].dtype == torch.bfloat16
    assert result["fp16"].item() == 40000
    assert result["torch's op"].item() == 4
    assert result["op by position"].item() == 4
    assert torch.equal(result["slices"], 2 * torch.arange(6.0).view(2, 3).t())


def gather(rank: int, size: int) -> Any:
    strategy = connected()
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    x.requires_grad_()
    gathered = strategy.all_gather({"x": x, "n": rank}, sync_grads=True)
    # Every rank uses another share of the gathered tensor, so that the gradient needs all of them.
    (gathered["x"] * (rank + 1) * torch.tensor([[1.0], [10.0]])).sum().backward()
    plain = strategy.all_gather(x)
    return gathered, x.grad, plain.requires_grad


def test_all_gather_stacks_in_rank_order_and_lets_gradients_back() -> None:
    for rank, (gathered, gradient, has_graph) in enumerate(run_ranks(gather, 2)):
        assert gathered["x"].tolist() == [[1, 2], [2, 4]]
        assert gathered["n"].tolist() == [0, 1]
        assert gradient.tolist() == [3.0 * 10**rank] * 2
        assert not has_graph


def differ(rank: int, size: int, kind: str) -> str:
    strategy = connected()
    with pytest.raises(RankFailure) as caught:  # noqa: PT012  each rank makes one of these calls
        if kind == "shape":
            strategy.all_gather(torch.ones(2 + rank))
        elif kind == "dtype":
            strategy.all_reduce({"a": torch.ones(2, dtype=torch.float64 if rank else torch.float32)})
        elif rank == 0:
            strategy.all_reduce(torch.ones(3))
        else:
            strategy.all_gather(torch.ones(3))
    # The group is still good.
    assert strategy.all_reduce(1, reduce_op="sum").item() == size
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["rank 0: all_gather of data (2,)", "rank 1: all_gather of data (3,)"]),
        ("dtype", ["data['a'] (2,) torch.float32", "data['a'] (2,) torch.float64"]),
        ("call", ["rank 0: all_reduce with 'mean'", "rank 1: all_gather"]),
    ],
)
def test_ranks_that_call_for_different_things_are_named_on_every_rank(kind: str, words: list[str]) -> None:
    for text in run_ranks(differ, 2, kind):
        assert all(word in text for word in words), text


def objects(rank: int, size: int) -> Any:
    strategy = connected()
    mine = {"rank": rank, "list": [rank] * rank, "tensor": torch.full((rank,), 1.0)}
    strategy.barrier("here")
    return {
        "broadcast": strategy.broadcast(mine, src=1),
        "gathered": strategy.gather_objects(mine),
        "all": strategy.reduce_boolean_decision(rank > 0),
        "any": strategy.reduce_boolean_decision(rank > 0, all=False),
        "topology": strategy.topology,
        "same": strategy.topology is strategy.topology,
    }


def test_objects_of_any_size_reach_every_rank() -> None:
    for rank, result in enumerate(run_ranks(objects, 3)):
        assert result["broadcast"]["list"] == [1]
        assert [one["rank"] for one in result["gathered"]] == [0, 1, 2]
        assert [one["tensor"].numel() for one in result["gathered"]] == [0, 1, 2]
        assert result["all"] is False
        assert result["any"] is True
        assert (result["topology"].global_rank, result["topology"].world_size) == (rank, 3)
        assert result["same"]


def test_before_the_processes_are_connected_everything_is_returned_as_it_is() -> None:
    strategy = ParallelStrategy()
    x: Tensor = torch.ones(2)
    assert strategy.all_reduce(x) is x
    assert strategy.reduce(3) == 3
    assert strategy.all_gather(x) is x
    assert strategy.broadcast(x, src=0) is x
    assert strategy.gather_objects(x) == [x]
    assert strategy.reduce_boolean_decision(True) is True
    strategy.barrier()


def scatter_structures(rank: int, size: int) -> Any:
    strategy = connected()
    x = torch.arange(2.0 * size * 3).view(2 * size, 3) * (rank + 1) + 1
    data = {
        "x": x,
        "n": torch.arange(size) + rank,
        "h": torch.full((size,), 1.0 + rank, dtype=torch.bfloat16),
        "t": "s",
    }
    before = x.clone().requires_grad_()
    found = {op: strategy.reduce_scatter(data, reduce_op=op) for op in OPS}
    whole = {op: strategy.reduce(data, reduce_op=op) for op in OPS}
    assert torch.equal(x, before)
    assert not strategy.reduce_scatter(before, "sum").requires_grad
    errors = []
    for wrong, op in ((torch.ones(size + 1), "sum"), (torch.ones(()), "sum"), (3, "sum"), (torch.ones(size), "median")):
        with pytest.raises(ConfigError) as caught:
            strategy.reduce_scatter(wrong, reduce_op=op)
        errors.append(str(caught.value))
    with pytest.raises(RankFailure, match="reduce_scatter"):
        strategy.reduce_scatter(torch.ones(size * (1 + rank)))
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=DDPStrategy())
    fabric.launch()
    by_fabric = (fabric.reduce(torch.tensor([rank]), reduce_op="sum"), fabric.reduce_scatter(x, reduce_op="sum"))
    return found, whole, errors, by_fabric


OPS = ("mean", "sum", "min", "max", "product")


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_its_part_of_the_reduction(size: int) -> None:
    given = [torch.arange(2.0 * size * 3).view(2 * size, 3) * (rank + 1) + 1 for rank in range(size)]
    stacked = torch.stack(given)
    reference = {
        "mean": stacked.mean(0), "sum": stacked.sum(0), "min": stacked.amin(0), "max": stacked.amax(0),
        "product": stacked.prod(0),
    }  # fmt: skip
    for rank, (found, whole, errors, by_fabric) in enumerate(run_ranks(scatter_structures, size)):
        for op in OPS:
            assert torch.equal(found[op]["x"], reference[op][2 * rank : 2 * rank + 2]), op
            for name in ("x", "n", "h"):
                parts = whole[op][name].chunk(size)
                assert found[op][name].dtype == parts[rank].dtype
                assert torch.equal(found[op][name], parts[rank]), (op, name)
            assert found[op]["t"] == "s"
        assert all(part in error for part, error in zip((f"({size + 1},)", "()", "3", "median"), errors, strict=True))
        assert f"a multiple of {size}" in errors[0]
        assert by_fabric[0].item() == sum(range(size))
        assert torch.equal(by_fabric[1], reference["sum"][2 * rank : 2 * rank + 2])
