"""`plan`: what a training would need with each strategy and mesh, and which of them fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, LoopwrightError, names_nearest
from ..fabric.choose import choose_strategy
from ..strategies.mesh import MeshStrategy
from ..strategies.mesh.pipeline.blocks import plan_stages
from ..strategies.mesh.pipeline.options import Pipeline
from ..strategies.optional import memory_shares
from .child_process import run_in_child
from .fake_world import NeedsValues
from .formulas import bubble_fraction, bytes_per_parameter
from .simulation import PARTS, Pass, Training, Usage, simulate
from .table import Plan, Row, kind_of, read_size

if TYPE_CHECKING:
    from torch import nn

    from ..strategies import Strategy


# Any in this file: batches, and arguments of strategies.

_SHORT = (3, 5)  # blocks of the two short models from which a long one is extrapolated, for each stage
_MOST_TP = 8
_CHECKPOINTED = " + checkpointing"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy that may be chosen.

    Attributes:
        name: Displayed name, and value of `strategy=` if there is no other line.
        line: The argument to write.
        make: Returns the strategy; None: that of this name.
        devices: Number of devices that it uses.
        pp: Number of pipeline stages.
        tp: Number of devices that layers are split over.
        checkpoints: Whether the Trainer's `activation_checkpointing=True` is part of the line: tried where the row
            without does not fit.
    """

    name: str
    line: str
    make: Callable[[], Strategy] | None = None
    devices: int = 1
    pp: int = 1
    tp: int = 1
    checkpoints: bool = False

    def strategy(self) -> Strategy | str:
        """Return the strategy, or its name."""
        return self.name.removesuffix(_CHECKPOINTED) if self.make is None else self.make()


@names_nearest
def plan(
    build: Callable[[], nn.Module],
    batch: Any,
    *,
    devices: int = 1,
    num_nodes: int = 1,
    memory: str | float | None = None,
    precision: str | None = None,
    optimizer: str | Callable[[nn.Module], Any] | None = None,
    accumulate: int = 1,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    bandwidth: str | float = "50GB",
) -> Plan:
    """Return the memory and communication that a training needs with each strategy and mesh, without launching it.

    Each row is a simulation in one process: the strategy trains two steps of the module on tensors without memory, in a
    simulated process group of the full size. Repeated blocks are extrapolated from two short models.

    Args:
        build: Function that returns the module, on the meta device: a `lw.Module`, or any module whose loss `loss`
            computes.
        batch: A batch of one process, as the loader of a rank returns it.
        devices: Number of devices per node.
        num_nodes: Number of nodes.
        memory: Memory of a device: bytes, or a text such as "80GB". None if unknown.
        precision: Name of the precision, as in the Trainer.
        optimizer: "adamw", "adam", "sgd", "sgd-momentum", or a function of the module that returns the optimizer. None
            is the module's `configure_optimizers`, else "adamw".
        accumulate: Micro-batches per optimizer step; pipelines use at least as many as they have stages.
        loss: Function of module and batch that returns the loss. None is the module's `training_step`, or the output of
            its forward.
        bandwidth: Bytes per second, or a text such as "50GB", that a device sends to the next one in a ring.

    Raises:
        ConfigError: An argument is invalid.
    """
    training = Training(build, batch, precision, _optimizer(optimizer), accumulate, loss)
    return plan_choices(
        training, choices(devices, num_nodes), memory=memory, bandwidth=bandwidth, devices=devices * num_nodes
    )


def plan_choices(
    training: Training,
    chosen: Sequence[Choice],
    *,
    devices: int,
    memory: str | float | None = None,
    bandwidth: str | float = "50GB",
    limit_s: float | None = None,
    until_fits: bool = False,
) -> Plan:
    """Return the plan of a training with some strategies; see `plan`.

    Args:
        training: What is trained.
        chosen: The strategies.
        devices: Number of devices, of all nodes.
        memory: See `plan`.
        bandwidth: See `plan`.
        limit_s: Seconds after which no further row begins; None: no limit.
        until_fits: Whether kinds of strategies are left out after the first one of which a row fits.
    """
    training = dataclasses.replace(training, casts_when_gathered=True)
    total = None if memory is None else read_size(memory)
    rate = read_size(bandwidth)
    begin = time.monotonic()
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for choice in chosen:
        found = Plan(tuple(rows), devices, total, rate, left_out)
        if until_fits and any(row.kind != kind_of(choice.name) for row in found.fitting):
            return found
        if limit_s is not None and time.monotonic() - begin > limit_s:
            left_out[choice.name] = f"planning took more than {limit_s:g} s"
            continue
        if choice.checkpoints and (training.checkpointing is not None or not _is_short(rows, choice)):
            continue
        try:
            rows.append(_row(training, choice, total, rate))
        except LoopwrightError as error:
            left_out[choice.name] = error.what
        except Exception as error:
            # Whatever a module raises on its parts, where it runs as a whole.
            if not rows or (choice.make is None and not choice.checkpoints):
                raise
            left_out[choice.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Plan(tuple(rows), devices, total, rate, left_out, training.notes)


def _is_short(rows: Sequence[Row], choice: Choice) -> bool:
    """Whether the row without checkpointing lacks memory."""
    plain = choice.name.removesuffix(_CHECKPOINTED)
    return any(row.name == plain and row.fits is False for row in rows)


# -- what is tried ---------------------------------------------------------------------------------------------------


def choices(devices: int, num_nodes: int = 1) -> list[Choice]:
    """Return the strategies for a number of devices per node, in order of preference.

    Without recomputed activations, the one that sends least is first. Layers are split within a node only.
    """
    size = devices * num_nodes
    found = [Choice("single_device", 'strategy="single_device", devices=1')]
    if size == 1:
        return [*found, _checkpointed(found[0])]
    ddp, fsdp = _named("ddp", size), _named("fsdp", size)
    found += [ddp, fsdp, _checkpointed(ddp), _recomputed("fsdp", size)]
    for tp in sorted({2, min(devices, _MOST_TP)}):
        if devices % tp == 0 and tp > 1:
            found.append(_mesh(size, tp=tp))
    for pp in (2, 4):
        if size % pp == 0:
            found.append(_mesh(size, pp=pp))
    return found


def meshes(devices: int, num_nodes: int = 1) -> list[Choice]:
    """Return the meshes for a number of devices per node, in order of preference; see `choices`."""
    size = devices * num_nodes
    found = [_mesh(size, dp=size), _mesh(size)]
    if num_nodes > 1 and devices > 1:
        found.append(_mesh(size, dp=num_nodes))
    for tp in sorted({2, min(devices, _MOST_TP)}):
        if devices % tp == 0 and tp > 1:
            found += [_mesh(size, dp=size // tp, tp=tp), _mesh(size, tp=tp)]
    for pp in (2, 4):
        if size % pp == 0:
            found.append(_mesh(size, pp=pp))
    return list({one.name: one for one in found}.values())


def _named(name: str, devices: int) -> Choice:
    return Choice(name, f'strategy="{name}"', devices=devices)


def _checkpointed(choice: Choice) -> Choice:
    line = f"{choice.line}, activation_checkpointing=True"
    return dataclasses.replace(choice, name=f"{choice.name}{_CHECKPOINTED}", line=line, checkpoints=True)


def _recomputed(name: str, devices: int) -> Choice:
    line = "strategy=lw.FSDPStrategy(activation_checkpointing=True)"
    return Choice(f"{name}{_CHECKPOINTED}", line, _checkpointing, devices)


def _checkpointing() -> Strategy:
    from ..strategies.fsdp import FSDPStrategy

    return FSDPStrategy(activation_checkpointing=True)


def _mesh(devices: int, *, dp: int = 1, tp: int = 1, pp: int = 1) -> Choice:
    fsdp = devices // (dp * tp * pp)
    axes = {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp}
    name = f"mesh:{','.join(f'{axis}={size}' for axis, size in axes.items() if size > 1)}"

    def make() -> Strategy:
        # What verifies the first batch computes with values.
        return MeshStrategy(pp=pp, dp=dp, fsdp=fsdp, tp=tp, verify=False)

    return Choice(name, f'strategy="{name}"', make, devices, pp, tp)


# -- rows ------------------------------------------------------------------------------------------------------------


def _row(training: Training, choice: Choice, memory: float | None, bandwidth: float) -> Row:
    """Return the row of a strategy."""
    if training.batches_per_step is not None:
        data_size = choice.devices // (choice.pp * choice.tp)
        training = dataclasses.replace(training, accumulate=max(training.batches_per_step // data_size, 1))
    if choice.pp > 1:
        training = dataclasses.replace(training, accumulate=max(training.accumulate, choice.pp))
    if choice.checkpoints:
        training = dataclasses.replace(training, checkpointing=True)
    note, is_complete = "", True
    try:
        usage = run_in_child(lambda: usage_of(training, choice))
        if usage.has_assumed:
            note = "the step reads values of tensors: planned with 1 for each number, False for each condition, and "
            note += "masks that select all"
        if usage.lacks_workspace:
            note += "; " if note else ""
            note += "the workspace of recurrent layers is not counted: only the device knows its size"
    except (NeedsValues, RuntimeError, NotImplementedError) as error:
        is_plain = choice.make is None and not choice.checkpoints
        if isinstance(error, LoopwrightError) or not (isinstance(error, NeedsValues) or is_plain):
            raise
        usage, is_complete = run_in_child(lambda: _estimated(training, choice)), False
        reason = f"the step cannot be simulated ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        if isinstance(error, NeedsValues):
            reason = "the step reads values of tensors"
        note = f"activations are not counted, and the optimizer as Adam: {reason}"
    return Row(
        name=choice.name,
        line=choice.line if choice.pp == 1 else f"{choice.line}, accumulate_grad_batches={training.accumulate}",
        devices=choice.devices,
        held=dict(usage.peak),
        sent=usage.sent_bytes,
        bubble=bubble_fraction(choice.pp, training.accumulate),
        memory=memory,
        bandwidth=bandwidth,
        note=note,
        is_complete=is_complete,
    )


def usage_of(training: Training, choice: Choice) -> Usage:
    """Return what the rank with the most uses; of a long model, extrapolated from two short ones."""
    ranks = {0, (choice.pp - 1) * choice.devices // choice.pp}
    return max((_of_rank(training, choice, rank) for rank in sorted(ranks)), key=lambda usage: usage.peak_bytes)


def _of_rank(training: Training, choice: Choice, rank: int) -> Usage:
    repeated = _repeated(training, choice.pp * _SHORT[1])
    if repeated is None:
        return simulate(training, choice.strategy(), devices=choice.devices, rank=rank)
    name, length = repeated
    counts = [choice.pp * count for count in _SHORT]
    length = -(-length // choice.pp) * choice.pp  # stages of unequal length: the longest one counts

    def shortened(count: int) -> Usage:
        short = dataclasses.replace(training, blocks=(name, count))
        return run_in_child(lambda: simulate(short, choice.strategy(), devices=choice.devices, rank=rank))

    try:
        few, more = map(shortened, counts)
    except (IndexError, KeyError, AttributeError):  # its forward asks for the blocks that were left out
        return simulate(training, choice.strategy(), devices=choice.devices, rank=rank)
    if few.passes and not all(map(_is_aligned, few.passes, more.passes)):  # of small blocks that are sharded together
        return simulate(training, choice.strategy(), devices=choice.devices, rank=rank)
    factor = (length - counts[0]) / (counts[1] - counts[0])
    return Usage(
        _moments(few, more, factor),
        _line(few.after_backward, more.after_backward, factor),
        _line(few.sent, more.sent, factor),
        (),
        few.has_assumed or more.has_assumed,
        few.lacks_workspace or more.lacks_workspace,
    )


def _moments(few: Usage, more: Usage, factor: float) -> list[dict[str, float]]:
    """Return the moments with the most bytes of a longer model."""
    lines = [_line(one, other, factor) for one, other in zip(few.moments, more.moments, strict=True)]
    if not few.passes:
        return lines
    found = []
    for one, other in zip(few.passes, more.passes, strict=True):
        size = len(one.changes)
        changes = [
            (kind, low + factor * (high - low))
            for (kind, low), (_, high) in zip(one.changes, _ends(other, size), strict=True)
        ]
        begin, end = _line(one.before, other.before, factor), _line(one.after, other.after, factor)
        for kind, change in changes[size // 2 :]:
            end[kind] -= change
        held = most = begin
        for number, (kind, change) in enumerate(changes):
            held = dict(end) if number == size // 2 else held
            held = {**held, kind: held[kind] + change}
            most = max(most, held, key=lambda each: sum(each.values()))
            if (number + 1) * PARTS // size != number * PARTS // size:
                found.append({key: max(0.0, value) for key, value in most.items()})
                most = held
    return [*found, lines[-1]]


def _ends(one: Pass, size: int) -> list[tuple[str, int]]:
    """Return as many changes of a pass as a shorter model's has: those of the first blocks, and of the last."""
    return [*one.changes[: size // 2], *one.changes[len(one.changes) - (size - size // 2) :]]


def _is_aligned(one: Pass, other: Pass) -> bool:
    """Whether the first and the last blocks of the longer model do what those of the shorter one do."""
    pairs = zip(one.changes, _ends(other, len(one.changes)), strict=True)
    return all(kind == same and (low > 0) == (high > 0) for (kind, low), (same, high) in pairs)


def _line(few: Mapping[str, float], more: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return what a number of blocks gives that lies `factor` times as far from `few` as `more` does."""
    return {key: max(0.0, few[key] + factor * (more[key] - few[key])) for key in few}


def _repeated(training: Training, most: int) -> tuple[str, int] | None:
    """Return the name and length of the module's list of repeated blocks if it is longer than `most`."""
    if isinstance(training.checkpointing, float):  # of all blocks
        return None
    with torch.device("meta"):
        module = training.build()
    try:
        name = plan_stages(module, Pipeline(), 1).list
    except LoopwrightError:
        return None
    blocks = list(module.get_submodule(name).children())
    shapes = {
        (type(one), tuple((key, each.shape, each.requires_grad) for key, each in one.named_parameters()))
        for one in blocks
    }
    return (name, len(blocks)) if len(shapes) == 1 and len(blocks) > most else None


def _estimated(training: Training, choice: Choice) -> Usage:
    """Return parameters, gradients and optimizer state by closed forms, where a module cannot be simulated."""
    with torch.device("meta"):
        module = training.build()
    chosen = choice.strategy()
    strategy = choose_strategy(chosen) if isinstance(chosen, str) else chosen
    shares = memory_shares(strategy, choice.devices, 1)
    each = bytes_per_parameter(training.precision or "32-true")
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in module.parameters() if not one.requires_grad)
    buffers = sum(one.nbytes for one in module.buffers())
    held = {
        "parameters": (trained + frozen) * each.weight / shares.weights + buffers,
        "gradients": trained * each.gradient / shares.gradients,
        "optimizer": trained * each.optimizer / shares.optimizer,
        "activations": 0.0,
        "gathered": trained * each.gradient * shares.buckets,
    }
    return Usage([held], held, {})


def _optimizer(wanted: str | Callable[[nn.Module], Any] | None) -> Callable[[nn.Module], Any] | None:
    if not isinstance(wanted, str):
        return wanted
    makers: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    }
    if wanted not in makers:
        raise ConfigError(
            f"Expected the name of an optimizer to plan with, got {wanted!r}.",
            fix=f"pass one of {', '.join(makers)}, or a function of the module that returns the optimizer.",
        )
    make = makers[wanted]
    return lambda module: make(module.parameters())
