"""A model built without memory, given its values unit by unit on two ranks, and sharded on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from loopwright.errors import ModuleError
from loopwright.strategies.construction.deferred import DeferredInit
from loopwright.strategies.construction.materialize import check_materializable, materialize, materialize_from_rank_zero

# Any in this file: results that travel between processes.

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)).conj(), persistent=False)
        self.flags = nn.Buffer(torch.tensor([True, False]))
        self.none = nn.Buffer(torch.ones(0))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.fill)

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.02)


def built(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def unlike(module: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of tensors that differ; sharded ones are gathered."""
    found = []
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, other in [*expected.named_parameters(), *expected.named_buffers()]:
        one: Any = own[name]
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        if not torch.equal(one.resolve_conj(), other.resolve_conj()) or one.dtype != other.dtype:
            found.append(name)
    return found


def shard_by_unit(size: int, *, from_rank_zero: bool, seed: int) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with DeferredInit():
        model = built(seed)
    assert [name for name, one in model.named_parameters() if not one.is_meta] == ["scale"]
    check_materializable(model)
    mesh = init_device_mesh("cpu", (size,))
    make = materialize_from_rank_zero if from_rank_zero else materialize
    done: list[nn.Module] = []
    for unit in [*model.blocks.layers, model]:
        make(unit, device=CPU, inner=done, root=model)
        assert not any(one.is_meta for one in unit.parameters())
        fully_shard(unit, mesh=mesh, ignored_params={model.scale})
        done.append(unit)
    return model


def case_sharded(rank: int, size: int) -> Any:
    expected = built(3)
    state = torch.get_rng_state()
    own = shard_by_unit(size, from_rank_zero=False, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert own.head.weight is own.embedding.weight
    sent = shard_by_unit(size, from_rank_zero=True, seed=3 + rank)  # other ranks' own values would be others
    return unlike(own, expected), unlike(sent, expected)


def case_only_rank_zero_has_values(rank: int, size: int) -> Any:
    with torch.device("meta" if rank == 1 else "cpu"):
        model = built(5)
    identity = {name: one for name, one in model.named_parameters() if not one.is_meta}
    materialize_from_rank_zero(model, device=CPU)
    assert all(dict(model.named_parameters())[name] is one for name, one in identity.items())
    assert model.head.weight is model.embedding.weight
    group = dist.new_group([1, 0])
    other = built(5 + rank)
    materialize_from_rank_zero(other, device=CPU, group=group)
    return unlike(model, built(5)), unlike(other, built(5))


def case_errors(rank: int, size: int) -> Any:
    wrong: list[Any] = [
        nn.Sequential(nn.Linear(2, 2 + rank)),
        nn.Sequential(nn.MultiheadAttention(2, 1, device="meta" if rank == 0 else "cpu")),
        built(0) if rank == 0 else built(0).to("meta"),  # which unties
    ]
    told = []
    for module in wrong:
        with pytest.raises(ModuleError) as caught:
            materialize_from_rank_zero(module, device=CPU)
        told.append(str(caught.value))
    return told


def all_cases(rank: int, size: int) -> Any:
    return case_sharded(rank, size), case_only_rank_zero_has_values(rank, size), case_errors(rank, size)


def test_units_have_the_values_of_one_process_and_ranks_agree() -> None:
    for sharded, received, told in run_ranks(all_cases, 2):
        assert sharded == ([], [])
        assert received == ([], [])
        assert "Expected the same model on all ranks" in told[0]
        assert "rank 1: 0.bias (2,) torch.float32, 0.bias (3,) torch.float32, 0.weight (2, 2)" in told[0]
        assert "rank 1: head.weight (8, 4) tied to embedding.weight, head.weight (8, 4) torch.float32" in told[2]
        assert "0 (MultiheadAttention): in_proj_bias, in_proj_weight on the meta device" in told[1]
