"""chunked_cross_entropy: the values and gradients of torch's cross entropy over all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright as lw
from loopwright.errors import ConfigError

WIDTH, VOCAB = 6, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 7, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(VOCAB, (3, 7), generator=generator)
    labels[0, 2:5] = -100
    labels[2] = -100
    return states, labels


def head(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, VOCAB, dtype=dtype)


@pytest.mark.parametrize("chunk_size", [1, 4, 21, None])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}, {"softcap": 2.0, "label_smoothing": 1.0}],
)
def test_values_and_gradients_are_those_of_all_logits(chunk_size: int | None, options: dict[str, Any]) -> None:
    states, labels = inputs()
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
    layer = head()
    logits = layer(states).flatten(0, 1)
    cap = options.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    torch_options = {name: value for name, value in options.items() if name != "softcap"}
    expected = F.cross_entropy(logits, labels.flatten(), **torch_options)
    found = lw.chunked_cross_entropy(states, layer, labels, chunk_size=chunk_size, **options)
    # Sums in another order: rounding of float64.
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    wanted = [states, *layer.parameters()]
    for one, other in zip(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_a_tied_embedding_gets_the_gradients_of_both_uses() -> None:
    _, labels = inputs()
    torch.manual_seed(2)
    embedding = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
    words = labels.clamp(min=0)
    expected = F.cross_entropy(F.linear(embedding(words), embedding.weight).flatten(0, 1), labels.flatten())
    found = lw.chunked_cross_entropy(embedding(words), embedding.weight, labels, chunk_size=4)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    (one,), (other,) = (torch.autograd.grad(loss, [embedding.weight]) for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_without_labels_the_mean_is_nan_and_the_sum_zero_as_in_torch() -> None:
    states, labels = inputs()
    labels = torch.full_like(labels, -100)
    assert lw.chunked_cross_entropy(states, head(), labels, chunk_size=4).isnan()
    assert lw.chunked_cross_entropy(states, head(), labels, chunk_size=4, reduction="sum") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    states, labels = inputs(dtype)
    layer = head(dtype)
    expected = F.cross_entropy(layer(states).flatten(0, 1).float(), labels.flatten())
    found = lw.chunked_cross_entropy(states, layer, labels, chunk_size=5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_autocast_and_hooks_hold_for_all_chunks() -> None:
    states, labels = inputs(torch.float32)
    layer, calls = head(torch.float32), []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(layer(states).flatten(0, 1).float(), labels.flatten())
        found = lw.chunked_cross_entropy(states, layer, labels, chunk_size=5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert len(calls) == 2  # one by each
    (one,), (other,) = (torch.autograd.grad(loss, [layer.weight]) for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=0, atol=2**-8 * float(other.abs().max()))  # gradients round to bfloat16


def test_logits_of_one_chunk_only_are_kept() -> None:
    states, labels = inputs()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        lw.chunked_cross_entropy(states, head(), labels, chunk_size=3)
    assert max(kept) < 21 * VOCAB


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.zeros(3, 6, dtype=torch.int64)}, "labels of shape"),
        ({"labels": torch.zeros(3, 7)}, "torch.int64"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"reduction": "none"}, "reduction"),
        ({"chunk_size": 2.0}, "chunk_size of at least 1, or None, got 2.0"),
        ({"chunk_size": "8"}, "chunk_size of at least 1, or None, got '8'"),
        ({"label_smoothing": "0.1"}, "label_smoothing from 0 to 1, got '0.1'"),
        ({"softcap": 0.0}, "softcap above 0, or None, got 0.0"),
        ({"ignore_index": None}, "a label as ignore_index, got None"),
        ({"head": torch.relu}, "a module that computes logits, .* got builtin"),
        ({"head": nn.Embedding(3, 4)}, r"got Embedding[\s\S]*pass embedding.weight"),
        ({"states": torch.zeros(4), "labels": torch.tensor(0)}, r"states of shape \(..., width\), got \(4,\)"),
    ],
)
def test_arguments_that_cannot_work_are_refused(change: dict[str, Any], words: str) -> None:
    states, labels = inputs()
    with pytest.raises(ConfigError, match=words):
        lw.chunked_cross_entropy(**{"states": states, "head": head(), "labels": labels, **change})


def _sharded(rank: int, size: int) -> tuple[str, float, float, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    states, labels = inputs()
    mesh = init_device_mesh("cpu", (size,))
    refusals = []
    tensor_parallel = parallelize_module(nn.Sequential(head()), mesh, {"0": ColwiseParallel()})
    for one in (tensor_parallel[0], tensor_parallel[0].weight):
        with pytest.raises(ConfigError, match="DTensor") as caught:
            lw.chunked_cross_entropy(states, one, labels, chunk_size=4)  # type: ignore[arg-type]
        refusals.append(str(caught.value))
    plain, sharded = head(), head()
    fully_shard(sharded, mesh=mesh)
    expected = lw.chunked_cross_entropy(states, plain, labels, chunk_size=4)
    found = lw.chunked_cross_entropy(states, sharded, labels, chunk_size=4)
    expected.backward()
    found.backward()
    gradient: Any = sharded.weight.grad
    assert plain.weight.grad is not None
    return refusals[0], found.item(), expected.item(), torch.equal(gradient.full_tensor(), plain.weight.grad)


def test_a_head_of_tensor_parallelism_is_refused_and_one_of_fsdp_is_right() -> None:
    for refusal, found, expected, is_equal in run_ranks(_sharded, 2):
        assert "loss_parallel" in refusal
        assert found == expected
        assert is_equal
