from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loopwright.errors import ModuleError
from loopwright.strategies.mesh.context.attention import Attention
from loopwright.strategies.mesh.context.interception import Interception
from loopwright.strategies.mesh.context.model import check_kernels, check_window, find_model
from loopwright.strategies.mesh.context.options import Context
from loopwright.strategies.mesh.context.parts import SequenceParts

SECOND = SequenceParts(None, 1, 2)  # nothing here communicates


def heads(count: int, length: int = 4) -> torch.Tensor:
    return torch.zeros(1, count, length, 2)


def test_a_mask_is_named() -> None:
    mode = Interception(Attention(SECOND, "gather"), 2)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with mode, mode.inside(), pytest.raises(ModuleError, match=r"got cp=2 with an attention mask of shape \(4, 4\)"):
        F.scaled_dot_product_attention(heads(2), heads(2), heads(2), attn_mask=mask)


def test_attention_to_another_sequence_is_named() -> None:
    with pytest.raises(ModuleError, match="got 4 queries and 6 keys on each rank"):
        Attention(SECOND, "gather")(heads(2), heads(2, 6), heads(2, 6))


@pytest.mark.parametrize(("queries", "keys", "fitting"), [(6, 3, "1, 3"), (3, 3, "1, 3"), (4, 1, "1")])
def test_heads_that_do_not_divide_are_named(queries: int, keys: int, fitting: str) -> None:
    with pytest.raises(ModuleError, match=rf"{keys} heads of keys and values(.|\n)*one of these as cp: {fitting}\."):
        Attention(SECOND, "ulysses")(heads(queries), heads(keys), heads(keys), enable_gqa=True)


def test_attention_outside_of_the_model_is_left_alone() -> None:
    mode = Interception(Attention(SECOND, "gather"), 2)
    query = torch.randn(1, 2, 4, 2)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    with mode:
        seen = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert torch.equal(seen, F.scaled_dot_product_attention(query, query, query, attn_mask=mask))
    assert mode.count == 0


class Sliding(nn.Module):
    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.sliding_window = width


def test_a_window_counts_where_it_is_narrower_than_the_sequence() -> None:
    check_window(nn.Sequential(Sliding(8), Sliding(None)), 8, 2)
    with pytest.raises(ModuleError, match="got cp=2 with a sliding window of 8 in 0"):
        check_window(nn.Sequential(Sliding(8)), 10, 2)


def test_a_compiled_model_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0]._compiled_call_impl = module[0]._call_impl  # what `compile()` sets
    with pytest.raises(ModuleError, match=r"got torch.compile on 0"):
        check_kernels(module, 2)


def test_the_model_is_the_only_child_unless_it_is_named() -> None:
    module = nn.Module()
    module.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.loss = nn.CrossEntropyLoss()
    assert find_model(module, Context())[1] is module.model
    assert find_model(module, Context(module="model.1"))[1] is module.model[1]
    assert find_model(module.model, Context())[1] is module.model
    with pytest.raises(ModuleError, match="got 'modle'.*model"):
        find_model(module, Context(module="modle"))
