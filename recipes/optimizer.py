"""`OptimizerSettings`: optimizers and learning rates of a recipe, for all parameters or for kinds of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError, nearest
from ..lazy import is_core
from ..optim import adamw, group_parameters
from ..schedules import SCHEDULES
from ..settings.names import ClassProblem, find_maker

# Any in this file: arguments of optimizers and schedules.

# What `groups` may name. A stack has three or more dimensions, as the weights of experts; a tied head is an embedding.
PARAMETER_KINDS = ("matrices", "vectors", "embeddings", "head", "stacks")


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and learning rate of a recipe.

    Args:
        learning_rate: Largest learning rate.
        weight_decay: Of matrices; vectors (norms, biases) have none.
        betas: Of AdamW.
        eps: Of AdamW.
        warmup: Steps in which the learning rate increases linearly (int), or their share of the steps (float).
        schedule: "cosine", "linear", "polynomial", "constant" or "wsd" (constant, and a decay in the last tenth), after
            the warm-up. See `lw.schedules`.
        min_lr: Last learning rate, as a share of the largest.
        scale_lr: Whether all learning rates are multiplied by the number of data ranks; `planning.scaled_lr`.
        optimizer: Another optimizer: `{"class_path": ..., "init_args": {...}}`. It gets the groups of parameters, and
            `learning_rate` where its arguments have no `lr`. Muon gets the matrices, and AdamW the rest.
        lr_scheduler: Another schedule, in the same form, stepped after each optimizer step.
        groups: Kind of parameters -> `optimizer`, in the same form, `learning_rate`, `weight_decay`, and arguments of
            the optimizer. What is not given is that of the other settings.
    """

    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: int | float = 0.03
    schedule: str = "cosine"
    min_lr: float = 0.0
    scale_lr: bool = False
    optimizer: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if not 0 < self.learning_rate < math.inf:
            yield f"learning_rate: Expected more than 0, got {self.learning_rate}."
        if not 0 <= self.weight_decay < math.inf:
            yield f"weight_decay: Expected at least 0, got {self.weight_decay}."
        if len(self.betas) != 2 or not all(0 <= one < 1 for one in self.betas):
            yield f"betas: Expected two numbers in [0, 1), got {self.betas}."
        if not self.eps > 0:
            yield f"eps: Expected more than 0, got {self.eps}."
        if not 0 <= self.warmup <= (1 if isinstance(self.warmup, float) else math.inf):
            yield f"warmup: Expected a whole number of steps, or a share in [0.0, 1.0], got {self.warmup}."
        if not 0 <= self.min_lr <= 1:
            yield f"min_lr: Expected a share in [0, 1], got {self.min_lr}."
        if self.schedule not in SCHEDULES:
            near = nearest(self.schedule, SCHEDULES)
            yield f"schedule: Expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}{near}."
        for name, base in (("optimizer", Optimizer), ("lr_scheduler", LRScheduler)):
            node = getattr(self, name)
            if node is not None:
                yield from _class_problems(name, node, base)
        for kind, options in self.groups.items():
            yield from _group_problems(kind, options)
        if self.scale_lr and self.lr_scheduler is not None and not _is_own_schedule(self.lr_scheduler):
            yield "scale_lr: Expected a schedule of lw.schedules beside it, got lr_scheduler, whose rates it may set."


def _class_problems(name: str, node: Any, base: type[Any]) -> Iterator[str]:
    if not isinstance(node, Mapping) or "class_path" not in node or set(node) - {"class_path", "init_args"}:
        yield f"{name}: Expected a mapping with class_path and init_args, got {node!r}."
        return
    try:
        found = find_maker(str(node["class_path"]), base)
    except ClassProblem as error:
        yield f"{name}: Expected a class of {base.__name__}, got {node['class_path']} ({error})."
        return
    if inspect.isclass(found) and issubclass(found, ReduceLROnPlateau):
        yield f"{name}: Expected a schedule of steps, got ReduceLROnPlateau, which needs a metric."


def _group_problems(kind: str, options: Any) -> Iterator[str]:
    if kind not in PARAMETER_KINDS:
        known = ", ".join(PARAMETER_KINDS)
        yield f"groups: Expected kinds of parameters ({known}), got {kind!r}{nearest(kind, PARAMETER_KINDS)}."
    elif not isinstance(options, Mapping):
        yield f"groups.{kind}: Expected optimizer, learning_rate and weight_decay, got {options!r}."
    else:
        for name in ("learning_rate", "weight_decay"):
            value = options.get(name, 1)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                yield f"groups.{kind}.{name}: Expected at least 0, got {value!r}."
        if options.get("optimizer") is not None:
            yield from _class_problems(f"groups.{kind}.optimizer", options["optimizer"], Optimizer)


def make_optimizers(settings: OptimizerSettings, module: nn.Module) -> list[Optimizer]:
    """Return the optimizers of the parameters that require gradients, vectors without weight decay.

    Muon, which trains matrices only, leaves the other parameters to AdamW. Its updates are scaled to the size of
    AdamW's, so that both have one learning rate.

    Args:
        settings: The settings.
        module: A module with the model as `model`, or the model.

    Raises:
        ConfigError: An optimizer does not take its arguments or parameters, or a group has no parameters.
    """
    node = settings.optimizer
    if node is not None and node["class_path"] in ("Muon", "torch.optim.Muon"):
        scaled = {**node, "init_args": {"adjust_lr_fn": "match_rms_adamw", **(node.get("init_args") or {})}}
        groups = {**settings.groups, "matrices": {"optimizer": scaled, **settings.groups.get("matrices", {})}}
        settings = replace(settings, optimizer=None, groups=groups)
    if settings.groups:
        return _make_by_kind(settings, module)
    arguments = (settings.optimizer or {}).get("init_args") or {}
    decay = arguments.get("weight_decay", settings.weight_decay)
    groups_of_all = group_parameters(module, [(_decays, {"weight_decay": decay})], others={"weight_decay": 0.0})
    return [_make("optimizer", settings, settings.optimizer, groups_of_all)]


def _make_by_kind(settings: OptimizerSettings, module: nn.Module) -> list[Optimizer]:
    """Return an optimizer for each group that has one or arguments of its own, and one for the rest."""
    kinds = _kinds(module)
    rules = [(partial(_is_kind, kinds, kind), {"name": kind}) for kind in PARAMETER_KINDS]
    groups = {group["name"]: group for group in group_parameters(module, rules)}
    made, rest = [], []
    for kind in PARAMETER_KINDS:
        options = dict(settings.groups.get(kind, {}))
        group = groups.get(kind)
        if group is None and options:
            raise ConfigError(
                f"groups.{kind}: Expected trained parameters of this kind, got none.",
                fix="leave the group out; a head that is tied to the embedding belongs to embeddings.",
            )
        node, rate = options.pop("optimizer", None), options.pop("learning_rate", None)
        decay = options.pop("weight_decay", 0.0 if kind == "vectors" else settings.weight_decay)
        if group is None:
            continue
        group.update(weight_decay=decay, **({} if rate is None else {"lr": rate}))
        if node is not None or options:
            made.append(_make(f"groups.{kind}", settings, node or settings.optimizer, [group], options))
        else:
            rest.append(group)
    return [*made, _make("optimizer", settings, settings.optimizer, rest)] if rest else made


def _make(
    name: str,
    settings: OptimizerSettings,
    node: Mapping[str, Any] | None,
    groups: list[dict[str, Any]],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Optimizer:
    """Return an optimizer; AdamW without a class.

    Args:
        name: Setting that the error names.
        settings: Of AdamW, and the learning rate where neither the class nor a group has one.
        node: The class with its arguments.
        groups: The parameters.
        options: Further arguments.

    Raises:
        ConfigError: The class does not take the arguments or the parameters.
    """
    made: Any = adamw if node is None else find_maker(str(node["class_path"]), Optimizer)
    arguments: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps} if node is None else {}
    arguments.update({**((node or {}).get("init_args") or {}), **options})
    arguments.setdefault("lr", settings.learning_rate)
    try:
        optimizer: Optimizer = made(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: Expected arguments and parameters that {made.__name__} takes, got {sorted(arguments)} ({error}).",
            fix="correct the arguments; an optimizer of matrices, such as Muon, is for groups.matrices.optimizer.",
        ) from error
    return optimizer


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return the kinds of the parameters that follow from their layers: embeddings and the head, by name."""
    model: Any = module if hasattr(module, "get_output_embeddings") else getattr(module, "model", module)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = {}
    for name, one in module.named_modules():
        kind = "embeddings" if isinstance(one, nn.Embedding) else "head" if one is head else None
        if kind is not None:
            kinds.update({f"{name}.{part}": kind for part, value in one.named_parameters() if _dims(value) > 1})
    return kinds


def _is_kind(kinds: Mapping[str, str], kind: str, name: str, parameter: nn.Parameter) -> bool:
    return (kinds.get(name) or _kind_of(name, parameter)) == kind


def _kind_of(name: str, parameter: nn.Parameter) -> str:
    if not _decays(name, parameter):
        return "vectors"
    return "matrices" if _dims(parameter) == 2 else "stacks"


def _dims(parameter: Tensor) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps a flat shard


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return _dims(parameter) > 1 and not name.endswith("bias")


def _is_own_schedule(node: Any) -> bool:
    """Return whether a node is one of `lw.schedules`; a wrong one is named elsewhere."""
    try:
        return is_core(find_maker(str(node["class_path"]), LRScheduler))
    except (ClassProblem, TypeError, KeyError):
        return True


def make_schedule(
    settings: OptimizerSettings, optimizer: Optimizer, num_steps: int, *, data_ranks: int = 1
) -> LRScheduler:
    """Return the schedule of the learning rate, to be stepped after each optimizer step.

    Args:
        settings: The settings.
        optimizer: The optimizer.
        num_steps: Optimizer steps of the entire run.
        data_ranks: Number of ranks with different rows, for `scale_lr`.
    """
    scale = {"devices": data_ranks} if settings.scale_lr else {}
    if settings.lr_scheduler is None:
        minimum = {} if settings.schedule == "constant" else {"min_lr_ratio": settings.min_lr}
        return SCHEDULES[settings.schedule](optimizer, num_steps, warmup=settings.warmup, **minimum, **scale)
    made: Any = find_maker(str(settings.lr_scheduler["class_path"]), LRScheduler)
    arguments = settings.lr_scheduler.get("init_args") or {}
    length = {"num_steps": num_steps, **scale} if is_core(made) else {}
    try:
        schedule: LRScheduler = made(optimizer, **{**length, **arguments})
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"lr_scheduler: Expected arguments that {made.__name__} takes, got {sorted(arguments)} ({error}).",
            fix="correct the arguments of the schedule.",
        ) from error
    return schedule
