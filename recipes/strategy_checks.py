"""Which strategies can train the model of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..strategies import Strategy
from .loss import find_router_loss
from .model.checks import skeleton
from .model.settings import ModelSettings


def strategy_problems(settings: ModelSettings, strategy: Strategy, *, packing: bool = True) -> list[str]:
    """Return why a strategy cannot train this model, as `name: Expected ..., got ...`; works before processes start.

    Args:
        settings: The model.
        strategy: The strategy.
        packing: Whether rows hold several samples.
    """
    sizes = strategy.traits.model_axes
    return [
        *_quantized(settings, strategy, sizes),
        *_adapted(settings, sizes),
        *_packed(sizes, packing=packing),
        *_routed(settings, sizes),
    ]


def _quantized(settings: ModelSettings, strategy: Strategy, sizes: Mapping[str, int]) -> Iterator[str]:
    if settings.quantize is None:
        return
    if sizes:
        axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
        yield f"strategy: Expected only the axes fsdp and dp with quantize (4-bit weights are not split), got {axes}."
    elif not strategy.traits.keeps_packed_weights:
        name = type(strategy).__name__
        yield f"strategy: Expected ddp, fsdp or one process with quantize, got {name}, which converts packed weights."
    kind = strategy.traits.accelerator_kind or strategy.device.type
    if kind not in ("cpu", "cuda"):
        yield f"quantize: Expected CUDA or a CPU, got {kind}."


def _adapted(settings: ModelSettings, sizes: Mapping[str, int]) -> Iterator[str]:
    if settings.lora is None:
        return
    if "pp" in sizes:
        yield "strategy: Expected no pipeline stages (pp) with lora, whose checkpoints leave the base out, got some."
    if "tp" in sizes:
        if settings.lora.dora:
            yield "strategy: Expected no tp with lora.dora, which needs the norm of entire weights, got tp."
        if not skeleton(settings).tp_plan:
            yield f"strategy: Expected a model with a tp_plan for lora with tp, got {settings.model}."


def _routed(settings: ModelSettings, sizes: Mapping[str, int]) -> Iterator[str]:
    axes = sorted({"pp", "cp"} & sizes.keys())
    if not axes or settings.router_aux_loss_coef == 0:
        return
    router = find_router_loss(skeleton(settings), settings.router_aux_loss_coef)
    if router is not None and router.weight:
        source = ", as config.json asks" if settings.router_aux_loss_coef is None else ""
        yield (
            f"router_aux_loss_coef: Expected 0 with the axis {axes[0]}, on which no rank has all logits of the "
            f"routers, got {router.weight}{source}."
        )


def _packed(sizes: Mapping[str, int], *, packing: bool) -> Iterator[str]:
    if "cp" in sizes and packing:
        yield "packing: Expected false with the axis cp, which does not separate samples by position_ids, got true."
