"""`memory_report`: who holds a device's memory, by owner and by module. Imported when memory has run out."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..accelerators.usage import process_peak_bytes

# Any in this file: autograd's nodes and torch's objects for sharded parameters, which have no public types.

_MOST_SHOWN = 20
_MOST_MODULES = 6
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS = "parameters", "gradients", "optimizer states", "activations"

# Whether the tensors that a graph keeps can be read without running hooks: not in torch 2.9.
READS_GRAPHS = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "data")

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory by owner; sizes in bytes.

    Attributes:
        owners: parameters, gathered units (full parameters of a sharded module), gradients, buffers, optimizer states,
            activations that autograd keeps for the backward pass, other tensors that Python knows, and the rest of
            what the device's allocator has handed out.
        activations: Module -> activations, the largest first; blocks as a whole.
        largest: The largest tensors: size, owner or the variable that holds it, shape and dtype.
        device: What device and system say: allocated, reserved, free, peak; of a CPU the process's memory.
    """

    owners: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    largest: list[dict[str, Any]] = field(default_factory=list)
    device: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the report as a text of several lines."""
        lines = [self.summary(), "device:"] + [f"  {name:<18} {_mib(size)}" for name, size in self.device.items()]
        lines += ["largest tensors:"]
        lines += [f"  {_mib(one['size_bytes'])}  {one['owner']}  {one['shape']} {one['dtype']}" for one in self.largest]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the lines of the owners, the activations with their modules."""
        lines = ["memory by owner:"]
        for name, size in self.owners.items():
            line = f"  {name:<18} {_mib(size)}"
            if name == _ACTIVATIONS and self.activations:
                shown = list(self.activations.items())[:_MOST_MODULES]
                line += ": " + ", ".join(f"{module} {_mib(part).strip()}" for module, part in shown)
                line += ", ..." if len(self.activations) > _MOST_MODULES else ""
            lines.append(line)
        if not READS_GRAPHS:
            lines.append(f"  {_ACTIVATIONS:<18} unknown: torch {torch.__version__} does not show them, newer ones do")
        return "\n".join(lines)


def memory_report(
    module: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    device: torch.device | None = None,
    error: BaseException | None = None,
) -> MemoryReport:
    """Return the current owners of a device's memory. It visits every Python object: do not call it at each step.

    Activations are found in the graphs of tensors that Python knows, above all in the frames of the error. A node of a
    graph belongs to the module whose parameters it reads, or to that of the node before it. torch 2.9 does not show
    what its graphs keep: there the report has no activations, and says so.

    Args:
        module: Module whose parameters, gradients and buffers are listed separately.
        optimizers: Optimizers whose states are listed separately.
        device: Device to report on; None: that of the module's first parameter.
        error: Error whose traceback provides names of tensors.
    """
    parameters, gathered, waiting = _parameters_of(module)
    if device is None:
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    others = list(_others(error))
    names = {id(one): name for name, one in [*parameters.items(), *gathered]}
    frozen = {_storage_of(one)[0]: n for n, one in parameters.items() if not one.requires_grad}
    saved = list(_saved([one for _, one in others], names, frozen))
    gradients = [(f"{name}.grad", p.grad) for name, p in parameters.items() if p.grad is not None]
    groups: dict[str, Named] = {
        _PARAMETERS: parameters.items(),
        "gathered units": gathered,
        _GRADIENTS: [*gradients, *waiting],
        "buffers": module.named_buffers(),
        _OPTIMIZER: _states(optimizers, names),
        _ACTIVATIONS: saved,
        "other tensors": others,
    }
    if not READS_GRAPHS:
        del groups[_ACTIVATIONS]
    seen: set[int] = set()
    owners: dict[str, int] = {}
    activations: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for owner, tensors in groups.items():
        owners[owner] = 0
        for name, tensor in tensors:
            size = _new_bytes(tensor, device, seen)
            owners[owner] += size
            if not size:
                continue
            if owner == _ACTIVATIONS:
                name = _block_of(name) or "outside of modules with parameters"
                activations[name] = activations.get(name, 0) + size
            found.append({"size_bytes": size, "owner": f"{owner}: {name}" if name else owner,
                          "shape": list(tensor.shape), "dtype": str(tensor.dtype)})  # fmt: skip
    stats = _device_stats(device)
    if "allocated" in stats:
        owners["rest"] = max(0, stats["allocated"] - sum(owners.values()))
    found.sort(key=lambda one: -one["size_bytes"])
    by_size = dict(sorted(activations.items(), key=lambda one: -one[1]))
    return MemoryReport(owners, by_size, found[:_MOST_SHOWN], stats)


def advise(report: MemoryReport, *, shards: bool, trains: bool, may_shrink: bool) -> str:
    """Return what takes less of what the report shows as the largest owner.

    Args:
        report: The report.
        shards: Whether parameters are sharded over ranks already.
        trains: Whether it ran out in training, and not in an evaluation, which has no backward pass.
        may_shrink: Whether the batch could be split by the trainer, and is not.
    """
    owners = report.owners
    state = owners[_PARAMETERS] + owners[_GRADIENTS] + owners[_OPTIMIZER]
    passing = owners.get(_ACTIVATIONS, 0) + owners["other tensors"] + owners.get("rest", 0)
    if state > passing:
        spread = "more devices" if shards else "strategy='fsdp' on several devices"
        return f"{spread}, an optimizer with less state, LoRA or QLoRA, precision='bf16-true'"
    if not trains:
        return "a smaller batch size, precision='bf16-mixed', shorter sequences"
    return ("Trainer(on_oom='shrink') or " if may_shrink else "") + (
        "a smaller batch size with accumulate_grad_batches, activation_checkpointing=, precision='bf16-mixed', "
        "shorter sequences"
    )


# --- where tensors are -----------------------------------------------------------------------------------------------


def _parameters_of(module: nn.Module) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Return the parameters, the full ones that units have gathered now, and the full gradients that wait there."""
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return parameters, [], []
    from .fsdp.root import groups_of, root_of, units_of  # not imported where nothing can be sharded

    root = root_of(module)
    gathered: list[tuple[str, Tensor]] = []
    waiting: list[tuple[str, Tensor]] = []
    if root is not None:
        parameters = dict(root.named_shards())  # the module's are full ones while they are gathered
    for one in [] if root is None else [p for u in units_of(root) for g in groups_of(u) for p in g.fsdp_params]:
        name = str(one._param_fqn).removeprefix("module.")
        full = getattr(one, "_unsharded_param", None)
        if full is not None:
            gathered.append((name, full))
        gathered += [(name, part) for part in getattr(one, "all_gather_outputs", ())]
        for gradient in (one.unsharded_accumulated_grad, None if full is None else full.grad):
            if gradient is not None:
                waiting.append((f"{name}.grad", gradient))
    return parameters, gathered, waiting


def _states(optimizers: Iterable[Optimizer], names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names.get(id(parameter), '?')}.{key}", value


def _others(error: BaseException | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that variables of the error's frames hold, by name, then all others that Python knows."""
    trace = None if error is None else error.__traceback__
    for frame, line in traceback.walk_tb(trace):
        for name, value in list(frame.f_locals.items()):
            values = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            )
            for one in values:
                if isinstance(one, Tensor):
                    yield f"{name} in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{line}", one
    for thing in gc.get_objects():
        # type() rather than isinstance: proxies run code when they are asked for their class.
        if issubclass(type(thing), Tensor):
            yield "", thing


# --- activations -----------------------------------------------------------------------------------------------------


def _saved(tensors: Iterable[Tensor], names: dict[int, str], frozen: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield what the graphs of these tensors keep for the backward pass, each with the name of its module.

    Args:
        tensors: Tensors with a graph, or without.
        names: Names of parameters by their ids.
        frozen: Those of parameters without a gradient by their addresses: a graph has no node for them, and keeps them.
    """
    owners: dict[Any, str] = {}
    # Children first: a node without parameters belongs to the module of the node whose output it reads.
    stack: list[tuple[Any, bool]]
    usual = (one for one in tensors if not is_lazy(one) and not one.is_inference())
    stack = [(one.grad_fn, False) for one in usual if one.grad_fn is not None]
    seen: set[Any] = set()
    while stack:
        node, is_ready = stack.pop()
        if not is_ready:
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            stack += [(one, False) for one, _ in node.next_functions if one is not None and one not in seen]
            continue
        owner = next((owners[one] for one, _ in node.next_functions if owners.get(one)), "")
        own = next(filter(None, (_parameter_behind(one, names) for one, _ in node.next_functions)), "")
        parts = list(_parts_of(node))
        own = own or next(filter(None, (frozen.get(_storage_of(part)[0]) for part in parts)), "")
        owners[node] = own.rpartition(".")[0] or own or owner
        yield from ((owners[node], part) for part in parts)


def _parameter_behind(node: Any, names: dict[int, str]) -> str:
    """Return the name of the parameter that this node reads, at most transposed or cast; "" for none."""
    for _ in range(4):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return names.get(id(variable), "")
        if node is None or len(node.next_functions) != 1:
            return ""
        if not _CHANGES_LAYOUT.match(type(node).__name__):
            return ""
        node = node.next_functions[0][0]
    return ""


_CHANGES_LAYOUT = re.compile(r"(T|Transpose|Permute|ToCopy|View|Unsafe_?View|Reshape\w*|Expand)Backward\d+$")


def _parts_of(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps; none that the backward pass has freed, or that are packed elsewhere."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        kept = getattr(node, name)
        for one in kept if isinstance(kept, list | tuple) else [kept]:
            data = getattr(one, "data", None)
            if isinstance(data, Tensor):
                yield data


def _block_of(name: str) -> str:
    """Return the block that a module is in, such as "blocks.3"; else the module itself."""
    match = re.match(r"(.*?\.\d+)(\.|$)", name)
    return match[1] if match else name


# --- sizes -----------------------------------------------------------------------------------------------------------


def _new_bytes(tensor: Tensor, device: torch.device, seen: set[int]) -> int:
    """Return the size of the tensor's storage; 0 if it is counted already or lies elsewhere."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.device.type != device.type or (device.index is not None and local.device.index != device.index):
        return 0
    where, size = _storage_of(local)
    if not where or where in seen:
        return 0
    seen.add(where)
    return size


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return address and size of a tensor's storage; zeros where it has none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, fake, lazy and functional tensors
        return 0, 0


def _device_stats(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "free": free,
            "total": total,
        }
    peak = process_peak_bytes()
    return {} if peak is None else {"peak of process": peak}


def _mib(size: int) -> str:
    return f"{size / 2**20:10.1f} MiB"
