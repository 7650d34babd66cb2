"""`chunked_cross_entropy`: the cross entropy of a large vocabulary, with the logits of a few positions at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import ArgumentTypeError, ConfigError

_CHUNK_LOGITS = 2**26  # elements; 256 MiB in float32, and as much for their gradient


def chunked_cross_entropy(
    states: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return `F.cross_entropy(head(states), labels)` without the logits of all positions in memory.

    Each chunk's logits are computed in the forward pass, and once more in the backward pass: the memory does not grow
    with positions times vocabulary, for one more product with the head's weights. Logits of 16 bits are converted to
    float32 before the softmax. The device is not read.

    A module is called once, so that its hooks run once; within, its `forward` runs for each chunk. Weights that other
    layers share (tied embeddings) get the sum of the gradients. Under fsdp, call it within the step.

    Args:
        states: What the head takes: shape (..., width), floating point.
        head: Module that computes logits of shape (n, vocabulary) from (n, width), each position by itself; or the
            weight of a linear layer without bias, of shape (vocabulary, width), such as that of an embedding.
        labels: Class of each position: the shape of `states` without the last dimension, int64.
        chunk_size: Positions with logits at the same time; None for as many as have 2**26 logits, and at least 64.
        ignore_index: Label of positions without a loss.
        label_smoothing: Part of the target that is spread over all classes, from 0 to 1.
        softcap: Limit of the logits' magnitude, softcap * tanh(logits / softcap); None for none.
        reduction: "mean" over positions with a loss (NaN without any, as in torch), or "sum".

    Returns:
        The loss: shape (), float32 or the logits' wider dtype.

    Raises:
        ConfigError: An argument is invalid, or the head's weights are shards of a mesh (DTensor) when it is called, as
            with tensor parallelism: each rank would have the logits of a part of the vocabulary.
    """
    _check(states, head, labels)
    _check_options(chunk_size, ignore_index, label_smoothing, softcap, reduction)
    states, labels = states.flatten(0, -2), labels.flatten()
    weight = head if isinstance(head, Tensor) else getattr(head, "weight", None)
    size = chunk_size or (default_chunk_size(len(weight)) if isinstance(weight, Tensor) else 1024)

    def sum_of(logits: Tensor, of: Tensor) -> Tensor:
        return summed_cross_entropy(
            logits, of, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap
        )

    if isinstance(head, Tensor):
        _refuse_shards([head])
        total = over_chunks(lambda some, of: sum_of(F.linear(some, head), of), states, labels, size, has_random=False)
    else:
        total = in_one_call(head, sum_of, states, labels, size)
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _check(states: Tensor, head: object, labels: Tensor) -> None:
    if not isinstance(head, nn.Module | Tensor) or isinstance(head, nn.Embedding):
        raise ArgumentTypeError(
            f"Expected a module that computes logits, or the weight of a linear layer, got {type(head).__name__}.",
            fix="pass embedding.weight." if isinstance(head, nn.Embedding) else "pass a module or a weight as head.",
        )
    if states.ndim < 2:
        raise ConfigError(
            f"Expected states of shape (..., width), got {tuple(states.shape)}.",
            fix="use states[None] and labels[None].",
        )
    if states.shape[:-1] != labels.shape:
        raise ConfigError(
            f"Expected labels of the shape of states without the last dimension, got states of shape "
            f"{tuple(states.shape)} and labels of shape {tuple(labels.shape)}.",
            fix="pass a label for each position.",
        )
    if labels.dtype != torch.int64:
        raise ArgumentTypeError(f"Expected labels of dtype torch.int64, got {labels.dtype}.", fix="use labels.long().")


def _check_options(
    chunk_size: object, ignore_index: object, label_smoothing: object, softcap: object, reduction: object
) -> None:
    if chunk_size is not None and not (_is_whole(chunk_size) and chunk_size >= 1):
        raise ConfigError(
            f"Expected chunk_size of at least 1, or None, got {chunk_size!r}.", fix="pass a whole number of positions."
        )
    if not _is_whole(ignore_index):
        raise ConfigError(f"Expected a label as ignore_index, got {ignore_index!r}.", fix="pass a whole number.")
    if not (isinstance(label_smoothing, int | float) and 0 <= label_smoothing <= 1):
        raise ConfigError(f"Expected label_smoothing from 0 to 1, got {label_smoothing!r}.", fix="pass such a number.")
    if softcap is not None and not (isinstance(softcap, int | float) and softcap > 0):
        raise ConfigError(f"Expected softcap above 0, or None, got {softcap!r}.", fix="pass None for no limit.")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"Expected reduction 'mean' or 'sum', got {reduction!r}.", fix="pass one of them.")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def default_chunk_size(vocab_size: int) -> int:
    """Return how many positions have their logits at once by default."""
    return max(64, _CHUNK_LOGITS // vocab_size)


def in_one_call(
    head: nn.Module, sum_of: Callable[[Tensor, Tensor], Tensor], states: Tensor, labels: Tensor, chunk: int
) -> Tensor:
    """Call the head once, and let it compute all chunks within the call.

    What a strategy does around it, such as gathering its weights, happens once.

    Args:
        head: Computes logits.
        sum_of: Returns the loss of logits and labels.
        states: Shape (n, width).
        labels: Shape (n,).
        chunk: Number of positions in a chunk.
    """
    forward: Callable[[Tensor], Tensor] = head.forward

    def one(some: Tensor, of: Tensor) -> Tensor:
        return sum_of(forward(some), of)

    def all_chunks(all_states: Tensor) -> Tensor:
        _refuse_shards([all_states, *head.parameters()])
        return over_chunks(one, all_states, labels, chunk, has_random=has_dropout(head))

    with _forward_of(head, all_chunks):
        total: Tensor = head(states)
    return total


def over_chunks(
    one: Callable[[Tensor, Tensor], Tensor], states: Tensor, labels: Tensor, chunk: int, *, has_random: bool
) -> Tensor:
    """Return the sum of a function of states and labels over chunks, each computed again in the backward pass."""
    if len(labels) <= chunk:
        return one(states, labels)
    # split, and not slices: each slice would have a gradient of the size of all states.
    pairs = zip(states.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(one, *pair, use_reentrant=False, preserve_rng_state=has_random) for pair in pairs]
    return torch.stack(losses).sum()


def summed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the sum of the cross entropy; logits of 16 bits are converted to float32 first."""
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module draws random numbers for dropout."""
    return any(isinstance(one, nn.Dropout) and one.p > 0 for one in module.modules())


def _refuse_shards(tensors: list[Tensor]) -> None:
    from torch.distributed.tensor import DTensor

    shards = next((one for one in tensors if isinstance(one, DTensor)), None)
    if shards is not None:
        raise ConfigError(
            f"Expected a head whose weights are whole in the step, got a DTensor with placements {shards.placements}.",
            fix="with tensor parallelism, leave the head out of the plan, or use torch's loss_parallel; "
            "with fsdp, call chunked_cross_entropy within the step of the module that was sharded.",
        )


@contextmanager
def _forward_of(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let calls of the module run the function between its hooks."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
