"""The cross entropy of trained tokens, in chunks: the value and the gradients of all logits at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipe_models import FAMILIES, VOCAB, batch, own_loss, save_model, settings
from torch import Tensor

from loopwright.recipes.loss import find_parts, full_loss, select_trained, selected_loss
from loopwright.recipes.model.loading import open_model
from loopwright.recipes.self_check import is_head_alone, own_output
from loopwright.trainer.chunked_cross_entropy import default_chunk_size


@pytest.mark.parametrize("calls_head", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks_have_the_loss_and_the_gradients_of_all_logits(tmp_path: Path, chunk: int, calls_head: bool) -> None:
    # LayerNorm computes in float64, where the norm of Llama rounds to float32.
    model = open_model(settings(save_model(tmp_path / "m", "gpt2"), dtype="float64"))
    given = batch()
    loss, count = own_loss(model, given)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    parts = find_parts(model)
    assert parts is not None
    found, _ = selected_loss(parts, select_trained(given), chunk, calls_head=calls_head)
    assert found.weight == int(count)
    torch.testing.assert_close(found.sum, loss, rtol=1e-14, atol=0)
    for one, other in zip(torch.autograd.grad(found.sum, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_losses_are_those_of_a_loop_by_hand(tmp_path: Path, family: str) -> None:
    model = open_model(settings(save_model(tmp_path / "m", family)))
    given = batch()
    loss, count = own_loss(model, given)
    full, _ = full_loss(model, given)
    parts = find_parts(model)
    assert parts is not None
    assert is_head_alone(own_output(model, given["input_ids"]), parts)
    selected, _ = selected_loss(parts, select_trained(given), 7)
    for found in (full, selected):
        assert int(found.weight) == int(count)
        torch.testing.assert_close(found.sum, loss, rtol=1e-6, atol=0)


def test_a_model_that_scales_its_logits_is_noticed(tmp_path: Path) -> None:
    model = open_model(settings(save_model(tmp_path / "m", "cohere")))
    parts = find_parts(model)
    assert parts is not None
    assert not is_head_alone(own_output(model, batch()["input_ids"]), parts)


def test_labels_in_no_row_give_a_loss_of_zero_with_gradients(tmp_path: Path) -> None:
    model = open_model(settings(save_model(tmp_path / "m")))
    given = batch()
    given["labels"].fill_(-100)
    parts = find_parts(model)
    assert parts is not None
    found, _ = selected_loss(parts, select_trained(given), 4)
    found.sum.backward()
    assert found.sum == 0
    assert found.weight == 0
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


def test_selected_positions_are_those_with_a_label() -> None:
    given = batch(3)
    found = select_trained(given)
    order: Tensor = found["order"]
    assert order.shape == given["labels"].shape
    chosen = order.flatten()[: found["num_trained"]]
    assert chosen.tolist() == [at for at, one in enumerate(given["labels"].flatten().tolist()) if one != -100]


def test_a_chunk_has_a_bounded_number_of_logits() -> None:
    assert default_chunk_size(VOCAB) > 100_000
    assert default_chunk_size(128_256) == 523
    assert default_chunk_size(2**30) == 64


def test_no_tensor_of_all_logits_exists(tmp_path: Path) -> None:
    vocab = 4099  # a size that no other dimension has
    model = open_model(settings(save_model(tmp_path / "m", vocab_size=vocab)))
    parts = find_parts(model)
    assert parts is not None
    given = select_trained(batch(8))
    assert given["num_trained"] > 30

    def largest(chunk: int) -> int:
        rows: list[int] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                result = func(*args, **(kwargs or {}))
                if isinstance(result, Tensor) and result.ndim == 2 and result.shape[1] == vocab:
                    rows.append(result.shape[0])
                return result

        with Watch():
            selected_loss(parts, given, chunk)[0].sum.backward()
        return max(one for one in rows if one != 32)  # 32: the gradient of the weight, transposed

    assert largest(8) == 8
    assert largest(10_000) == given["num_trained"]
