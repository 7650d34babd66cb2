"""Memory of a training per device, computed from sizes: formulas of docs/strategies.md, and simulated activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..planning.child_process import run_in_child
from ..planning.fake_world import NeedsValues
from ..planning.formulas import transformer_activation_bytes
from ..planning.planner import choices, usage_of
from ..planning.simulation import Training
from ..strategies.traits import MemoryShares
from ..trainer.chunked_cross_entropy import default_chunk_size
from .loss import find_parts, hidden_states
from .model.adapters import add_adapters
from .model.loading import base_dtype, meta_model, read_config, skeleton
from .settings import TrainSettings

if TYPE_CHECKING:
    from .model.loading import ModelSettings

# Any in this file: models and configurations of transformers.

# 4 bits, and a float32 scale for each block of 64 values.
_NF4_BYTES = 0.5 + 4 / 64
_LOGITS_COPIES = 3  # logits, their softmax, and its gradient
_TWO_BYTES = {"bf16-mixed", "16-mixed", "bf16-true", "16-true", "bf16", "16", "float8", "mxfp8"}


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements of a model.

    Attributes:
        trained: Trained parameters.
        frozen: Frozen parameters.
        frozen_bytes: Their bytes.
        layers: Blocks.
        hidden: Width of hidden states.
        vocab: Rows of the embedding.
    """

    trained: int
    frozen: int
    frozen_bytes: float
    layers: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device.

    Attributes:
        formula: The sum of weights, gradients, optimizer and buffers in P, as in docs/strategies.md, for float32.
        width: Bytes of a trained parameter.
        weights: Parameters.
        gradients: Gradients after the backward pass.
        optimizer: Moments, and float32 copies of 16-bit parameters.
        buffers: Buckets in which gradients are reduced.
        activations: Of a micro-batch, from a simulation.
        logits: Logits of a chunk of tokens, with their gradients.
        is_adamw: Whether the optimizer is one whose moments are known.
    """

    formula: str
    width: int
    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    logits: float
    is_adamw: bool

    @property
    def state(self) -> float:
        """Everything but activations and logits."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> float:
        """The sum."""
        return self.state + self.activations + self.logits


def count_sizes(settings: ModelSettings) -> Sizes:
    """Return the sizes of a model, from its configuration only."""
    config = read_config(settings)
    model: Any = skeleton(settings)
    base = sum(one.numel() for one in model.parameters())
    width = torch.finfo(base_dtype(config, settings)).bits / 8
    trained, frozen, frozen_bytes = base, 0, 0.0
    if settings.lora is not None:
        linear = _linear_elements(model) if settings.quantize else 0
        frozen, frozen_bytes = base, linear * _NF4_BYTES + (base - linear) * width
        adapted = add_adapters(model, settings.lora, has_values=False)
        trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    text = config.get_text_config()
    layers, hidden, vocab = (int(getattr(text, name)) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return Sizes(trained, frozen, frozen_bytes, layers, hidden, vocab)


def _linear_elements(model: Any) -> int:
    """Return the elements of the linear layers that are quantized: all but the output layer."""
    head = model.get_output_embeddings()
    return sum(one.weight.numel() for one in model.modules() if isinstance(one, nn.Linear) and one is not head)


def plan_memory(settings: TrainSettings, sizes: Sizes, shares: MemoryShares) -> MemoryPlan:
    """Return the memory of a device.

    Args:
        settings: The settings.
        sizes: Of the model.
        shares: What `SharesMemory.memory_shares` returned.
    """
    is_short = str(settings.precision) in _TWO_BYTES
    is_true = is_short and "true" in str(settings.precision)
    lora, quantize = settings.model_settings().lora, settings.model_settings().quantize
    width = _width(settings.dtype)
    if is_true or (shares.has_float32_copies and is_short):
        width = 2
    elif lora is not None:
        width = max(4, width)  # peft keeps adapters of a 16-bit base in float32
    frozen_bytes = min(sizes.frozen_bytes, 2 * sizes.frozen) if is_true and not quantize else sizes.frozen_bytes
    moments, is_adamw = _moments(settings)
    masters = 4 if shares.has_float32_copies else 0
    states = 4 if shares.has_float32_copies else width
    trained = sizes.trained
    return MemoryPlan(
        formula=shares.formula,
        width=width,
        weights=(trained * width + frozen_bytes) / shares.weights,
        gradients=trained * width / shares.gradients,
        optimizer=trained * (moments * states + masters) / shares.optimizer,
        buffers=trained * width * shares.buckets,
        activations=_activations(settings, sizes, shares, 2 if is_short else 4) / shares.activations,
        logits=_logits(settings, sizes),
        is_adamw=is_adamw,
    )


def _width(dtype: str | None) -> int:
    return 4 if dtype is None else torch.finfo(getattr(torch, dtype)).bits // 8


def _moments(settings: TrainSettings) -> tuple[int, bool]:
    """Return the number of tensors that the optimizer keeps per parameter, and whether that is known."""
    if settings.groups:
        return 2, False
    node = settings.optimizer_settings().optimizer
    if node is None:
        return 2, True
    name = str(node["class_path"]).rpartition(".")[2]
    if name == "SGD":
        return int(bool(dict(node.get("init_args") or {}).get("momentum"))), True
    return 2, name in ("Adam", "AdamW", "NAdam", "RAdam")


def _activations(settings: TrainSettings, sizes: Sizes, shares: MemoryShares, width: int) -> float:
    """Return the bytes of a micro-batch's activations before the output layer, from a simulation of a step."""
    shape = (settings.micro_batch, settings.max_length)
    ids = torch.zeros(shape, dtype=torch.int64)
    precision = settings.precision
    if isinstance(precision, str) and precision.startswith(("16", "fp16")):
        precision = f"bf{precision.removeprefix('fp')}"  # of equal sizes: a CPU need not have float16
    is_cast = shares.casts_parameters and str(precision).startswith("bf16")

    def build() -> nn.Module:
        model = meta_model(settings.model_settings()).train()
        return model.to(torch.bfloat16) if is_cast else model

    training = Training(
        build,
        (ids, ids),
        None if precision is None else str(precision),
        optimizers=lambda model: torch.optim.SGD(model.parameters()),
        loss=sum_of_states,
    )
    try:
        moments = run_in_child(lambda: usage_of(training, choices(1)[0])).moments
    except (NeedsValues, RuntimeError):  # a model that reads values, or runs on some devices only
        return transformer_activation_bytes(
            math.prod(shape),
            sizes.hidden,
            sizes.layers,
            element_bytes=width,
            is_checkpointed=settings.gradient_checkpointing,
        )
    return max(one["activations"] for one in moments)


def sum_of_states(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return a sum over the hidden states that the output layer gets: logits are made in chunks, and counted apart."""
    parts = find_parts(model)
    if parts is None:
        logits: Tensor = cast("Any", model)(input_ids=batch[0], use_cache=False).logits
        return logits.sum()
    return hidden_states(parts, *batch).sum()


def _logits(settings: TrainSettings, sizes: Sizes) -> float:
    tokens = settings.micro_batch * settings.max_length
    if settings.chunk_tokens != 0:
        tokens = min(tokens, settings.chunk_tokens or default_chunk_size(sizes.vocab))
    return math.prod((tokens, sizes.vocab, 4, _LOGITS_COPIES))
