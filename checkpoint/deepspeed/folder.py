"""Reader of folders that DeepSpeed's `engine.save_checkpoint` has written.

    latest                                            the name of the subfolder that was saved last
    <tag>/mp_rank_00_model_states.pt                  weights, counts, the user's entries: stages 0, 1, 2
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt the same of rank r: stage 3
    <tag>/zero_pp_rank_<r>_mp_rank_00_optim_states.pt rank r's shard of masters and optimizer state: stages 1 to 3
    <tag>/zero/<name>/fp32.pt, exp_avg.pt, ...        a universal checkpoint, of `ds_to_universal`: full tensors

All of them are pickles with objects of DeepSpeed's classes, read by `file/restricted.py`, which executes no code.
DeepSpeed's own objects are left out; any other name is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...protocols import StateDict
from ..sharded.reader import read_to
from ..tensors import AnyTensor, Key, bracketed, map_tensors, memory_key
from ..to_plain import to_plain
from ..verified import verify_as
from .files import (
    FULL_MODEL,
    MODEL_OF_RANK,
    OPTIMIZER_OF_RANK,
    UNIVERSAL,
    DeepSpeedFiles,
    checkpoint_files,
    damaged,
    find_tag_folder,
    is_universal,
    refuse_unsupported,
    some,
    unsupported,
)
from .optimizers import flats_of, merged_steps, names_of_groups, numbered, steps_of_rank, without_zero
from .partitions import Flat, MergedTensor, Misfit, group_layouts, parameter_layouts

logger = logging.getLogger(__name__)

# Any in this file: what DeepSpeed and its users have put into the files.

_OWN_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "sparse_tensor_module_names", "csr_tensor_module_names", "num_experts",
    "ds_autoep_layers", "autoep_layers",
))  # fmt: skip
# Of Lightning up to 2.0, which wrapped the user's module.
_LIGHTNING_PREFIX = "_forward_module."


@dataclass(slots=True)
class DeepSpeedFolder:
    """The content of a folder of DeepSpeed, in the field's keys; its tensors are not read.

    Attributes:
        path: The tag's folder.
        tree: `state_dict` with float32 weights, `optimizer_states`, `lr_schedulers`, counts, and the client's entries.
        form: "DeepSpeed folder" or "DeepSpeed universal folder".
        metadata: Version, stage and number of ranks.
        dropped: Paths of entries and names of classes that were left out, since they are not plain values.
    """

    path: Path
    tree: StateDict
    form: str
    metadata: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def load(path: Path, *, map_location: Any, lazy: bool, is_safe: bool, verify: bool) -> StateDict:
    """Return the content of a folder for the Trainer; see `storage.load`.

    Args:
        path: The folder.
        map_location: Device for the tensors, as in torch.load.
        lazy: Whether tensors stay in the files until they are read.
        is_safe: Whether entries that are not plain values are an error; else they are left out, with a warning. They
            are not unpickled in either case.
        verify: Whether to compare the checksums of the files first.
    """
    if verify:
        for file in checkpoint_files(path):
            verify_as(file, str(file))
    folder = read_folder(path)
    if folder.dropped and is_safe:
        raise CheckpointError(
            f"{str(path)!r} has entries that are neither tensors nor plain values: {some(folder.dropped)}.",
            fix="pass weights_only=False, which leaves them out (no code in the files is executed either way), or "
            "`loopwright checkpoint convert FOLDER out.ckpt --drop-objects`.",
        )
    if folder.dropped:
        logger.warning("%s: left out, since they are not plain values: %s", path, some(folder.dropped))
    if lazy:
        return folder.tree
    placed: dict[object, Tensor] = {}

    def place(value: AnyTensor, keys: tuple[Key, ...]) -> Tensor:
        # The files are mapped: tied weights of one file are two tensors with one memory.
        memory = memory_key(value)
        if memory not in placed:
            if isinstance(value, Tensor):
                value = MergedTensor(bracketed(keys), value.shape, [value.reshape(-1)], value.dtype)
            placed[memory] = read_to(value, map_location)
        return placed[memory]

    tree: StateDict = map_tensors(folder.tree, place)
    return tree


def read_folder(path: Path) -> DeepSpeedFolder:
    """Return the content of a folder of DeepSpeed; tensors stay in the files.

    Args:
        path: The folder of `engine.save_checkpoint`, or a tag's folder in it, or a universal checkpoint.

    Raises:
        CheckpointError: Files are missing, are of another number of ranks, or do not fit together; or the model is
            sharded in an unsupported way.
    """
    folder = find_tag_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{str(path)!r} has no checkpoint of DeepSpeed.", fix="pass the folder of engine.save_checkpoint."
        )
    refuse_unsupported(folder)
    try:
        return _Reader(folder).read()
    except Misfit as error:
        raise damaged(folder, f"{error} (of another save, or offloaded to a disk)") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(folder, f"a file is malformed ({type(error).__name__}: {error})") from error


class _Reader:
    """Read one tag's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = DeepSpeedFiles(folder)
        self.is_partitioned = False  # whether the parameters themselves are sharded over ranks (stage 3)

    def read(self) -> DeepSpeedFolder:
        models = self._models()
        model = models[0]
        weights: StateDict = {}
        is_converted = is_universal(self.folder)
        metadata = {"deepspeed": str(model.get("ds_version", "unknown"))}
        if is_converted:
            weights, optimizer = self._universal(models)
            metadata["stage"] = "universal"
        elif model.get("param_shapes"):
            weights, optimizer = self._zero(models)
            metadata["stage"] = "3" if self.is_partitioned else "1 or 2"
        else:
            weights, optimizer = without_zero(model)
            metadata["stage"] = "0"
        if "dp_world_size" in model:
            metadata["ranks"] = str(model["dp_world_size"])
        plain, dropped = to_plain({key: value for key, value in model.items() if key not in _OWN_KEYS})
        tree: StateDict = {"epoch": 0, "global_step": int(model.get("global_steps") or 0), **(plain or {})}
        weights = self._completed(weights, models)
        tree["state_dict"], names = _without_prefix(weights, model.get("ds_config"))
        tree.pop("optimizer_states", None)
        if optimizer is not None:
            tree["optimizer_states"] = [_renamed(optimizer, names)]
        if "lr_schedulers" not in tree:
            schedule, left_out = to_plain(model.get("lr_scheduler"), "lr_scheduler")
            dropped += left_out
            tree["lr_schedulers"] = [] if schedule is None else [schedule]
        form = "DeepSpeed universal folder" if is_converted else "DeepSpeed folder"
        return DeepSpeedFolder(self.folder, tree, form, metadata, [*dropped, *sorted(self.files.named)])

    def _models(self) -> list[StateDict]:
        """Return the files with weights: one, or in stage 3 one of each rank."""
        full = self.folder / FULL_MODEL
        ranks = self.files.by_rank(MODEL_OF_RANK)
        if full.is_file() and ranks and not is_universal(self.folder):
            raise damaged(self.folder, f"there are both {FULL_MODEL} and {ranks[min(ranks)].name}: files of two saves")
        if full.is_file():
            return [self.files.load_dict(full)]
        if not ranks:
            return [{"module": {}}]
        self.is_partitioned = True
        first = self.files.load_dict(ranks[min(ranks)])
        self.files.require_all(ranks, int(first.get("dp_world_size") or len(ranks)), "model states")
        return [first, *(self.files.load_dict(ranks[rank]) for rank in sorted(ranks)[1:])]

    # -- ZeRO ------------------------------------------------------------------------------------------------------

    def _zero(self, models: Sequence[StateDict]) -> tuple[StateDict, StateDict | None]:
        files = self.files.by_rank(OPTIMIZER_OF_RANK)
        if not files:
            raise damaged(self.folder, "the optimizer states of all ranks are missing, which hold the float32 weights")
        first = steps_of_rank(self.files.load_dict(files[min(files)]))
        if len(first.num_ranks) > 1:
            raise unsupported(self.folder, "experts that are sharded over ranks (MoE)")
        size = max(first.num_ranks, default=len(files))
        self.files.require_all(files, size, "optimizer states")
        ranks = [first, *(steps_of_rank(self.files.load_dict(files[rank])) for rank in sorted(files)[1:])]
        shapes = models[0]["param_shapes"]
        wrong = [rank for rank, one in enumerate(ranks) if len(one.masters) != len(shapes)]
        if wrong:
            count = len(ranks[wrong[0]].masters)
            raise Misfit(f"rank {wrong[0]} has masters of {count} groups, and the model has {len(shapes)}")
        if self.is_partitioned:
            if len(models) != size:
                raise Misfit(f"there are model states of {len(models)} ranks, and optimizer states of {size}")
            sizes = [sum(part.numel() for part in one.masters) for one in ranks]
            layouts = parameter_layouts(shapes, sizes)
        else:
            totals = [sum(one.masters[group].numel() for one in ranks) for group in range(len(shapes))]
            layouts = group_layouts(shapes, totals, first.paddings, size)
        masters = flats_of(ranks, self.is_partitioned, lambda rank, group: rank.masters[group])
        weights = {name: layout.merged(name, masters, torch.float32) for name, layout in layouts.items()}
        return weights, merged_steps(ranks, layouts, is_partitioned=self.is_partitioned)

    # -- universal -------------------------------------------------------------------------------------------------

    def _universal(self, models: Sequence[StateDict]) -> tuple[StateDict, StateDict | None]:
        common = self.files.load_dict(self.folder / UNIVERSAL / "optimizer_state.pt")
        inner = common.get("optimizer_state_dict")
        inner = inner if isinstance(inner, dict) else {}
        shapes: StateDict = {}
        for group in models[0].get("param_shapes") or []:
            shapes.update(group)
        weights: StateDict = {}
        states: dict[str, StateDict] = {}
        step = next((entry["step"] for entry in inner.get("state", {}).values() if "step" in entry), None)
        root = self.folder / UNIVERSAL
        for file in sorted(root.rglob("*.pt")):
            name = file.parent.relative_to(root).as_posix()
            if name == ".":
                continue
            value = self.files.load(file)
            if isinstance(value, dict):
                if any(key in value for key in ("sub_param_shape", "ep_is_expert_param")):
                    raise unsupported(self.folder, f"{name} sharded by tensor parallelism or MoE")
                value = value["param"]
            if isinstance(value, Tensor) and value.ndim and name in shapes:
                value = MergedTensor(f"{name} ({file.name})", shapes[name], [value.detach().reshape(-1)], value.dtype)
            if file.stem == "fp32":
                weights[name] = _as_float32(name, value)
            else:
                states.setdefault(name, {})[file.stem] = value
        for entry in states.values():
            if step is not None and "step" not in entry:
                entry["step"] = step
        groups = common.get("param_groups") or inner.get("param_groups")
        members = models[0].get("param_shapes")
        if not groups or not members:
            return weights, None
        names = names_of_groups(groups, [list(group) for group in members])
        return weights, numbered(groups, names, states)

    # -- the rest of the weights -------------------------------------------------------------------------------------

    def _completed(self, weights: StateDict, models: Sequence[StateDict]) -> StateDict:
        """Return the model's weights in its order: trained, frozen and tied parameters, and buffers, as float32."""
        model = models[0]
        saved = model.get("module") or {}
        buffers = set(model.get("buffer_names") or ())
        shared = dict(model.get("shared_params") or {})
        shapes = dict(model.get("frozen_param_shapes") or {})
        fragments = [one.get("frozen_param_fragments") or {} for one in models]
        result: StateDict = {}
        lost = []
        for name, value in saved.items():
            if name in weights and not (name in buffers and _is_full(value, weights[name])):
                result[name] = weights[name]
            elif self.is_partitioned and name in shapes and name in fragments[0]:
                pieces = Flat([part[name] for part in fragments]).pieces(0, shapes[name].numel())
                result[name] = MergedTensor(name, shapes[name], pieces, torch.float32)
            elif name in shared:
                result[name] = None  # below; this keeps its position
            elif self.is_partitioned and name not in buffers and isinstance(value, Tensor) and not value.numel():
                lost.append(name)
            else:
                result[name] = _as_float32(name, value)
        if lost:
            raise damaged(self.folder, f"the files have no values of {some(lost)}")
        result.update({name: value for name, value in weights.items() if name not in result})
        for name, source in shared.items():
            if name in result:
                result[name] = result[source]
        return result


# --- names -----------------------------------------------------------------------------------------------------------


def _without_prefix(weights: StateDict, config: object) -> tuple[StateDict, dict[str, str]]:
    """Return weights without the prefix of a module around the user's, and the changed names."""
    ours = config.get("loopwright") if isinstance(config, dict) else None
    prefix = str(ours["prefix"]) if ours else _LIGHTNING_PREFIX
    if not weights or not all(name.startswith(prefix) for name in weights):
        return weights, {}
    names = {name: name.removeprefix(prefix) for name in weights}
    return {names[name]: value for name, value in weights.items()}, names


def _renamed(optimizer: StateDict, names: Mapping[str, str]) -> StateDict:
    for group in optimizer["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [names.get(name, name) for name in group["param_names"]]
    return optimizer


def _is_full(value: Any, like: Any) -> bool:
    """Return whether a buffer is in the model's file, with its dtype, which ds_to_universal does not keep."""
    return isinstance(value, Tensor) and value.shape == like.shape


def _as_float32(name: str, value: object) -> object:
    if not isinstance(value, Tensor) or value.dtype not in (torch.float16, torch.bfloat16):
        return value.detach() if isinstance(value, Tensor) else value
    return MergedTensor(name, value.shape, [value.detach().reshape(-1)], torch.float32)
