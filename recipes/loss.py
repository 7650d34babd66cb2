"""The loss of language models: cross entropy over trained tokens, with or without all logits at once.

`full_loss` calls the model as transformers does, and has the logits of all positions. `selected_loss` computes hidden
states, drops positions without a label, and computes the logits of a few tokens at a time: in the forward pass, and
once more in the backward pass. Its memory does not depend on the length of a batch times the size of the vocabulary.

`RouterLoss` is what a model with experts adds to its loss so that its router uses all of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..trainer.chunked_cross_entropy import has_dropout, in_one_call, over_chunks, summed_cross_entropy
from ..trainer.loop.loss import Loss

# Any in this file: models of transformers, whose outputs have no types here.

IGNORED = -100
_ROUTER_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class ModelParts:
    """A causal language model in two parts.

    Attributes:
        decoder: Computes hidden states.
        head: Computes logits from hidden states.
        softcap: Limit of the logits' magnitude, where the model has one.
    """

    decoder: nn.Module
    head: nn.Module
    softcap: float | None = None


@dataclass(frozen=True)
class RouterLoss:
    """The loss of unequally used experts, as the model's own code defines it.

    It is a product of two means over the tokens of a micro-batch, so it depends on which rows stand together.

    Attributes:
        weight: Its factor in the loss.
        own_weight: The factor in the loss that the model itself returns; 0 where its configuration asks for none.
        function: Takes router logits, the number of experts, how many of them a token gets, and a mask of tokens.
        num_experts: Number of experts.
        top_k: How many of them a token gets.
    """

    weight: float
    own_weight: float
    function: Callable[..., Tensor]
    num_experts: int
    top_k: int

    def value(self, router_logits: Sequence[Tensor], is_real: Tensor | None = None) -> Tensor:
        """Return the loss of a micro-batch, without the factor: shape ().

        Args:
            router_logits: Of each layer with experts.
            is_real: Tokens that are not padding, shape (rows, length); None for all.
        """
        return self.function(tuple(router_logits), self.num_experts, self.top_k, is_real)

    def of_batch(self, router_logits: Sequence[Tensor], batch: Mapping[str, Any], tokens: Tensor | float) -> Loss:
        """Return the loss of a micro-batch, which counts as much as its trained tokens."""
        lengths, is_real = batch.get("lengths"), None
        if lengths is not None:
            width = batch["input_ids"].shape[1]
            is_real = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
        return Loss(self.value(router_logits, is_real) * tokens, tokens)


def find_router_loss(model: nn.Module, weight: float | None = None) -> RouterLoss | None:
    """Return the router's loss of a model of transformers or peft; None where there is none.

    Args:
        model: The model.
        weight: Its factor; None for what the model's configuration asks for.
    """
    base: Any = _base_of(model)
    function = getattr(sys.modules[type(base).__module__], "load_balancing_loss_func", None)
    experts, top_k = getattr(base, "num_experts", None), getattr(base, "num_experts_per_tok", None)
    if function is None or not isinstance(experts, int) or not isinstance(top_k, int):
        return None
    if [*inspect.signature(function).parameters] != _ROUTER_ARGUMENTS:
        return None  # the check of the model's own loss then finds what it adds
    is_asked = getattr(base.config.get_text_config(), "output_router_logits", False)
    factor = getattr(base, "router_aux_loss_coef", getattr(base, "aux_loss_coef", 0.0))
    own_weight = float(factor) if is_asked else 0.0
    return RouterLoss(own_weight if weight is None else weight, own_weight, function, experts, top_k)


def _base_of(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def find_parts(model: nn.Module) -> ModelParts | None:
    """Return the two parts of a model of transformers or peft; None where they cannot be distinguished."""
    base = _base_of(model)
    head = base.get_output_embeddings()
    decoder = base.get_decoder()
    if head is None or decoder is base:
        return None
    config = base.config.get_text_config()
    return ModelParts(decoder, head, getattr(config, "final_logit_softcapping", None))


def select_trained(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch on the host with `order`, the positions with a label first, and their number `num_trained`.

    The step then selects them without waiting for the device. `order` has the shape of the labels, so that the number
    of samples in the batch remains known.
    """
    is_ignored = batch["labels"].flatten() == IGNORED
    order = torch.argsort(is_ignored, stable=True).view(batch["labels"].shape)
    return {**batch, "order": order, "num_trained": int(is_ignored.numel() - is_ignored.sum())}


def full_loss(
    model: nn.Module, batch: Mapping[str, Any], *, router: RouterLoss | None = None, has_positions: bool = True
) -> tuple[Loss, Loss | None]:
    """Return the sum of the cross entropy over trained tokens, and their number; and the router's loss.

    Args:
        model: The model of transformers, or a PeftModel.
        batch: `input_ids`, `labels` (shifted already) and `position_ids`, each of shape (rows, length); and `lengths`,
            the tokens of each row without padding, for the router's loss.
        router: The router's loss; None for none.
        has_positions: Whether the model gets `position_ids`.
    """
    options = {"position_ids": batch["position_ids"]} if has_positions else {}
    if router is not None:
        options["output_router_logits"] = True
    labels = batch["labels"].flatten()
    output = model(input_ids=batch["input_ids"], use_cache=False, **options)
    tokens = (labels != IGNORED).sum()
    loss = Loss(summed_cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=IGNORED), tokens)
    return loss, None if router is None else router.of_batch(output.router_logits, batch, tokens)


def selected_loss(
    parts: ModelParts,
    batch: Mapping[str, Any],
    chunk: int,
    *,
    router: RouterLoss | None = None,
    calls_head: bool = False,
) -> tuple[Loss, Loss | None]:
    """Return what `full_loss` does, from the logits of trained tokens only, `chunk` of them at a time.

    Args:
        parts: The parts of the model.
        batch: As `select_trained` returns it, on the device.
        chunk: Number of tokens; more of them are computed in several chunks, twice each.
        router: The router's loss; None for none.
        calls_head: Whether the head is called for each chunk. Else it is called once, and computes all chunks within
            the call: what a strategy does around it, such as gathering its weights, happens once.
    """
    options = {} if router is None else {"output_router_logits": True}
    output: Any = parts.decoder(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **options
    )
    states = output[0].flatten(0, 1)
    count = int(batch["num_trained"])
    chosen = batch["order"].flatten()[:count]
    states, labels = states[chosen], batch["labels"].flatten()[chosen]
    if calls_head:
        total = _by_calls(parts, states, labels, chunk)
    else:
        sum_of = partial(summed_cross_entropy, ignore_index=IGNORED, softcap=parts.softcap)
        total = in_one_call(parts.head, sum_of, states, labels, chunk)
    loss = Loss(total, float(count))
    return loss, None if router is None else router.of_batch(output.router_logits, batch, float(count))


def hidden_states(parts: ModelParts, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Return the hidden states that the head gets: shape (rows, length, width)."""
    output: Any = parts.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    states: Tensor = output[0]
    return states


def part_logits(parts: ModelParts, states: Tensor) -> Tensor:
    """Return the logits of hidden states."""
    logits: Tensor = parts.head(states)
    return logits if parts.softcap is None else torch.tanh(logits / parts.softcap) * parts.softcap


def _by_calls(parts: ModelParts, states: Tensor, labels: Tensor, chunk: int) -> Tensor:
    def one(some: Tensor, of: Tensor) -> Tensor:
        return summed_cross_entropy(part_logits(parts, some), of, ignore_index=IGNORED)

    return over_chunks(one, states, labels, chunk, has_random=has_dropout(parts.head))
