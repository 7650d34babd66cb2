"""Reads folders that DeepSpeed's `engine.save_checkpoint` has written. Called by forms.py, storage.py and verified.py.

    latest                                            the name of the folder below that was saved last
    <tag>/mp_rank_00_model_states.pt                  weights, counts, what the user had saved: stages 0, 1, 2
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt the same of rank r: stage 3
    <tag>/zero_pp_rank_<r>_mp_rank_00_optim_states.pt rank r's part of masters and optimizer state: stages 1 to 3
    <tag>/zero/<name>/fp32.pt, exp_avg.pt, ...        a universal checkpoint, of `ds_to_universal`: whole tensors

All of them are pickles with objects of DeepSpeed's classes. They are read by restricted.py, which executes nothing:
DeepSpeed's own objects are left out, since nothing here needs them, and any other name is refused.
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .convert_plain import to_plain
from .deepspeed_parts import Flat, Layout, MergedTensor, Misfit, cut_groups, cut_parameters
from .lazy import is_tensor, map_tensors
from .restricted import WITHOUT_ATTRIBUTES, load_replacing

__all__ = ["DeepSpeedFolder", "find_tag_folder", "is_deepspeed_folder", "load"]

logger = logging.getLogger(__name__)

# Any in this file: what DeepSpeed and its users have put into the files.

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL = "zero"
WHOLE_MODEL = "mp_rank_00_model_states.pt"

_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OPTIMIZER_OF_RANK = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_CUT_OTHERWISE = {
    r"(\w+_)?mp_rank_(?!00)\d+_\w+\.pt": "tensor parallelism",
    r"(layer_\d+_)?expert_\d+_\w+\.pt|expp_rank_\w+\.pt": "experts that ranks share out (MoE)",
    r"layer_\d+-model_[\w-]+\.pt": "pipeline stages",
}
_OWN_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "sparse_tensor_module_names", "csr_tensor_module_names", "num_experts",
    "ds_autoep_layers", "autoep_layers",
))  # fmt: skip
# Of Lightning up to 2.0, which had a module of its own around the user's.
_LIGHTNING_PREFIX = "_forward_module."
_FIX = "copy the folder again from where it came, with the files of all ranks."
_MAX_NAMED = 5


@dataclass(slots=True)
class _Rank:
    """The masters and the optimizer state of one rank.

    Attributes:
        masters: A tensor for each group, or in stage 3 for each subgroup.
        states: The optimizer's state by number of group or subgroup.
        groups: Its parameter groups; `params` has numbers of groups or subgroups.
        paddings: After each parameter of each group; None where DeepSpeed does not say.
        num_ranks: How many ranks have saved; for each group, if they differ.
    """

    masters: list[Tensor]
    states: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    paddings: Any
    num_ranks: set[int]


@dataclass(slots=True)
class DeepSpeedFolder:
    """The content of a folder of DeepSpeed, in the field's keys; its tensors are not read.

    Attributes:
        path: The tag's folder.
        tree: `state_dict` with float32 weights, `optimizer_states`, `lr_schedulers`, counts, and the client's entries.
        form: "DeepSpeed folder" or "DeepSpeed universal folder".
        metadata: Version, stage and number of ranks.
        dropped: Paths of entries and names of classes that were left out, since they are no plain values.
    """

    path: Path
    tree: dict[str, Any]
    form: str
    metadata: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def find_tag_folder(path: Path) -> Path | None:
    """Return the folder with the files: the path itself, or the one below that `latest` names; None if there is none.

    A universal checkpoint is taken where the path is its folder, or nothing but `latest_universal` is there.
    """
    if _has_model(path):
        return path
    for mark in (LATEST, LATEST_UNIVERSAL):
        try:
            tag = (path / mark).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        below = path / tag
        if tag and Path(tag).parts == (tag,) and tag != ".." and _has_model(below):
            return below
    try:
        below_it = [entry for entry in path.iterdir() if entry.is_dir() and _has_model(entry)]
    except OSError:
        return None
    return below_it[0] if len(below_it) == 1 else None


def is_deepspeed_folder(path: Path) -> bool:
    """Return whether DeepSpeed has saved a checkpoint in a folder, or in a folder directly below."""
    return path.is_dir() and find_tag_folder(path) is not None


def _has_model(folder: Path) -> bool:
    names = (WHOLE_MODEL, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return any((folder / name).is_file() for name in names) or _is_universal(folder)


def _is_universal(folder: Path) -> bool:
    return (folder / UNIVERSAL / "optimizer_state.pt").is_file()


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that a load reads, by name."""
    folder = find_tag_folder(path)
    assert folder is not None
    return sorted(folder.rglob("*.pt"))


def load(path: Path, *, map_location: Any, lazy: bool, is_safe: bool, verify: bool) -> dict[str, Any]:
    """Return the content of a folder for the Trainer; see `storage.load`.

    Args:
        path: The folder.
        map_location: As in torch.load.
        lazy: Whether tensors stay in the files until they are read.
        is_safe: Whether entries that are no plain values are an error; else they are left out, with a warning. They
            are not unpickled in either case.
        verify: Whether to compare the checksums of the files first.
    """
    from .sharded.reader import read_to
    from .verified import verify_as

    if verify:
        for file in checkpoint_files(path):
            verify_as(file, str(file))
    folder = read_folder(path)
    if folder.dropped and is_safe:
        raise CheckpointError(
            f"{str(path)!r} has entries that are no tensors or plain values: {_some(folder.dropped)}.",
            fix="pass weights_only=False, which leaves them out (nothing in the files is executed either way), or "
            "`loopwright checkpoint convert FOLDER out.ckpt --drop-objects`.",
        )
    if folder.dropped:
        logger.warning("%s: left out, since they are no plain values: %s", path, _some(folder.dropped))
    if lazy:
        return folder.tree
    placed: dict[object, Tensor] = {}

    def place(value: Any, where: str) -> Tensor:
        # The files are mapped: tied weights of one file are two tensors with one memory.
        memory = (value.data_ptr(), value.shape, value.stride()) if isinstance(value, Tensor) else id(value)
        if memory not in placed:
            read = (
                MergedTensor(where, value.shape, [value.reshape(-1)], value.dtype)
                if isinstance(value, Tensor)
                else value
            )
            placed[memory] = read_to(read, map_location)
        return placed[memory]

    tree: dict[str, Any] = map_tensors(folder.tree, place)
    return tree


def read_folder(path: Path) -> DeepSpeedFolder:
    """Return the content of a folder of DeepSpeed; tensors stay in the files.

    Args:
        path: What `engine.save_checkpoint` was given, or the tag's folder in it, or a universal checkpoint.

    Raises:
        CheckpointError: Files are missing, are of another number of ranks, or do not fit together; or the model was cut
            in a way that is not known here.
    """
    folder = find_tag_folder(path)
    if folder is None:
        raise CheckpointError(
            f"{str(path)!r} has no checkpoint of DeepSpeed.", fix="pass what engine.save_checkpoint got."
        )
    _refuse_other_cuts(folder)
    try:
        return _Reader(folder).read()
    except Misfit as error:
        raise _damaged(folder, f"{error} (of another save, or offloaded to a disk)") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(folder, f"a file is malformed ({type(error).__name__}: {error})") from error


class _Reader:
    """Read one tag's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: set[str] = set()  # classes and functions that files name, beside DeepSpeed's
        self.is_cut = False  # whether the ranks have parts of the parameters themselves (stage 3)

    def read(self) -> DeepSpeedFolder:
        models = self._models()
        model = models[0]
        weights: dict[str, Any] = {}
        is_universal = _is_universal(self.folder)
        metadata = {"deepspeed": str(model.get("ds_version", "unknown"))}
        if is_universal:
            weights, optimizer = self._universal(models)
            metadata["stage"] = "universal"
        elif model.get("param_shapes"):
            weights, optimizer = self._zero(models)
            metadata["stage"] = "3" if self.is_cut else "1 or 2"
        else:
            weights, optimizer = _without_zero(model)
            metadata["stage"] = "0"
        if "dp_world_size" in model:
            metadata["ranks"] = str(model["dp_world_size"])
        plain, dropped = to_plain({key: value for key, value in model.items() if key not in _OWN_KEYS})
        tree: dict[str, Any] = {"epoch": 0, "global_step": int(model.get("global_steps") or 0), **(plain or {})}
        weights = self._completed(weights, models)
        tree["state_dict"], names = _without_prefix(weights, model.get("ds_config"))
        tree.pop("optimizer_states", None)
        if optimizer is not None:
            tree["optimizer_states"] = [_renamed(optimizer, names)]
        if "lr_schedulers" not in tree:
            schedule, left_out = to_plain(model.get("lr_scheduler"), "lr_scheduler")
            dropped += left_out
            tree["lr_schedulers"] = [] if schedule is None else [schedule]
        form = "DeepSpeed universal folder" if is_universal else "DeepSpeed folder"
        return DeepSpeedFolder(self.folder, tree, form, metadata, [*dropped, *sorted(self.named)])

    # -- files -----------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> Any:
        try:
            with open(path, "rb") as file:
                is_zip = file.read(2) == b"PK"
            with warnings.catch_warnings():  # about old storages, which do not matter here
                warnings.simplefilter("ignore")
                named: set[str] = set()
                content = load_replacing(path, mmap=is_zip, named=named, known=WITHOUT_ATTRIBUTES)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, IndexError,
                AttributeError) as error:  # fmt: skip
            reason = str(error).partition("\n")[0][:200]
            raise _damaged(self.folder, f"{path.name} cannot be read: {reason}") from error
        shown = path.relative_to(self.folder)
        self.named |= {f"{name} (in {shown})" for name in named if not name.startswith("deepspeed.")}
        return content

    def _load_dict(self, path: Path) -> dict[str, Any]:
        content = self._load(path)
        if not isinstance(content, dict):
            raise _damaged(self.folder, f"{path.name} holds a {type(content).__name__}, and not a dict")
        return content

    def _models(self) -> list[dict[str, Any]]:
        """Return the files with weights: one, or in stage 3 one of each rank."""
        whole = self.folder / WHOLE_MODEL
        ranks = self._by_rank(_MODEL_OF_RANK)
        if whole.is_file() and ranks and not _is_universal(self.folder):
            raise _damaged(
                self.folder, f"there are both {WHOLE_MODEL} and {ranks[min(ranks)].name}: files of two saves"
            )
        if whole.is_file():
            return [self._load_dict(whole)]
        if not ranks:
            return [{"module": {}}]
        self.is_cut = True
        first = self._load_dict(ranks[min(ranks)])
        self._require_all(ranks, int(first.get("dp_world_size") or len(ranks)), "model states")
        return [first, *(self._load_dict(ranks[rank]) for rank in sorted(ranks)[1:])]

    def _by_rank(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            rank = int(match[pattern.groups])
            if rank in found:
                raise _damaged(self.folder, f"there are both {found[rank].name} and {path.name}: files of two saves")
            found[rank] = path
        return found

    def _require_all(self, found: Mapping[int, Path], size: int, what: str) -> None:
        missing = [rank for rank in range(size) if rank not in found]
        extra = [found[rank].name for rank in sorted(found) if rank >= size]
        if missing:
            raise _damaged(
                self.folder,
                f"{size} ranks have saved it, and the {what} of rank {_some(missing)} are missing",
            )
        if extra:
            raise _damaged(self.folder, f"{size} ranks have saved it, and there is {_some(extra)}: files of two saves")

    # -- ZeRO ------------------------------------------------------------------------------------------------------

    def _zero(self, models: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        files = self._by_rank(_OPTIMIZER_OF_RANK)
        if not files:
            raise _damaged(self.folder, "the optimizer states of all ranks are missing, which hold the float32 weights")
        first = _rank_of(self._load_dict(files[min(files)]))
        if len(first.num_ranks) > 1:
            raise _unsupported(self.folder, "experts that ranks share out (MoE)")
        size = max(first.num_ranks, default=len(files))
        self._require_all(files, size, "optimizer states")
        ranks = [first, *(_rank_of(self._load_dict(files[rank])) for rank in sorted(files)[1:])]
        shapes = models[0]["param_shapes"]
        wrong = [rank for rank, one in enumerate(ranks) if len(one.masters) != len(shapes)]
        if wrong:
            count = len(ranks[wrong[0]].masters)
            raise Misfit(f"rank {wrong[0]} has masters of {count} groups, and the model has {len(shapes)}")
        if self.is_cut:
            if len(models) != size:
                raise Misfit(f"there are model states of {len(models)} ranks, and optimizer states of {size}")
            sizes = [sum(part.numel() for part in one.masters) for one in ranks]
            layouts = cut_parameters(shapes, sizes)
        else:
            totals = [sum(one.masters[group].numel() for one in ranks) for group in range(len(shapes))]
            layouts = cut_groups(shapes, totals, first.paddings, size)
        masters = _flats(ranks, self.is_cut, lambda rank, group: rank.masters[group])
        weights = {name: layout.merged(name, masters, torch.float32) for name, layout in layouts.items()}
        return weights, _merged_state(ranks, layouts, is_cut=self.is_cut)

    # -- universal -------------------------------------------------------------------------------------------------

    def _universal(self, models: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        common = self._load_dict(self.folder / UNIVERSAL / "optimizer_state.pt")
        inner = common.get("optimizer_state_dict")
        inner = inner if isinstance(inner, dict) else {}
        shapes: dict[str, Any] = {}
        for group in models[0].get("param_shapes") or []:
            shapes.update(group)
        weights: dict[str, Any] = {}
        states: dict[str, dict[str, Any]] = {}
        step = next((entry["step"] for entry in inner.get("state", {}).values() if "step" in entry), None)
        root = self.folder / UNIVERSAL
        for file in sorted(root.rglob("*.pt")):
            name = file.parent.relative_to(root).as_posix()
            if name == ".":
                continue
            value = self._load(file)
            if isinstance(value, dict):
                if any(key in value for key in ("sub_param_shape", "ep_is_expert_param")):
                    raise _unsupported(self.folder, f"parts of {name} that tensor parallelism or MoE has cut")
                value = value["param"]
            if is_tensor(value) and value.ndim and name in shapes:
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
        names = _names_of_groups(groups, [list(group) for group in members])
        return weights, _numbered(groups, names, states)

    # -- the rest of the weights -------------------------------------------------------------------------------------

    def _completed(self, weights: dict[str, Any], models: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return all of the model's weights in its order: trained, frozen, tied ones and buffers; floats as float32."""
        model = models[0]
        saved = model.get("module") or {}
        buffers = set(model.get("buffer_names") or ())
        shared = dict(model.get("shared_params") or {})
        shapes = dict(model.get("frozen_param_shapes") or {})
        fragments = [one.get("frozen_param_fragments") or {} for one in models]
        result: dict[str, Any] = {}
        lost = []
        for name, value in saved.items():
            if name in weights and not (name in buffers and _is_whole(value, weights[name])):
                result[name] = weights[name]
            elif self.is_cut and name in shapes and name in fragments[0]:
                pieces = Flat([part[name] for part in fragments]).pieces(0, shapes[name].numel())
                result[name] = MergedTensor(name, shapes[name], pieces, torch.float32)
            elif name in shared:
                result[name] = None  # below; its place in the order is here
            elif self.is_cut and name not in buffers and isinstance(value, Tensor) and not value.numel():
                lost.append(name)
            else:
                result[name] = _as_float32(name, value)
        if lost:
            raise _damaged(self.folder, f"there is nothing of {_some(lost)} in the files")
        result.update({name: value for name, value in weights.items() if name not in result})
        for name, source in shared.items():
            if name in result:
                result[name] = result[source]
        return result


# --- what the optimizers keep ----------------------------------------------------------------------------------------


def _rank_of(content: dict[str, Any]) -> _Rank:
    saved = content["optimizer_state_dict"]
    if "fp32_flat_groups" in saved:
        inner, masters = saved["optimizer_state_dict"], saved["fp32_flat_groups"]
    else:
        inner, masters = saved["base_optimizer_state"], saved["single_partition_of_fp32_groups"]
    # A list is of `elastic_checkpoint`, which does not save the parameter groups.
    states, groups = (inner["state"], inner["param_groups"]) if isinstance(inner, dict) else ({}, [])
    count = saved.get("partition_count")
    counts = {int(one) for one in count} if isinstance(count, list | tuple) else {int(count)} if count else set()
    return _Rank(list(masters), states, groups, saved.get("param_alignment_paddings"), counts)


def _flats(ranks: Sequence[_Rank], is_cut: bool, part: Any) -> list[Flat]:
    """Return the long tensors: of each rank in stage 3, of each group in the others."""
    groups = range(len(ranks[0].masters))
    if is_cut:
        return [Flat([part(rank, group) for group in groups]) for rank in ranks]
    return [Flat([part(rank, group) for rank in ranks]) for group in groups]


def _merged_state(ranks: Sequence[_Rank], layouts: Mapping[str, Layout], *, is_cut: bool) -> dict[str, Any] | None:
    """Return the optimizer's state in torch's layout."""
    first = ranks[0]
    if not first.groups:
        return None

    def is_flat(value: Any, group: int) -> bool:
        return isinstance(value, Tensor) and value.ndim == 1 and value.numel() >= first.masters[group].numel()

    keys = {key for group, entry in first.states.items() for key, value in entry.items() if is_flat(value, group)}
    flats = {}
    for key in sorted(keys):

        def part(rank: _Rank, group: int, key: str = key) -> Tensor:
            size = rank.masters[group].numel()
            value = rank.states.get(group, {}).get(key)
            # Where one group has no such state; nobody reads it.
            return value.narrow(0, 0, size) if isinstance(value, Tensor) else torch.zeros(1).expand(size)

        flats[key] = _flats(ranks, is_cut, part)
    by_group: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        by_group.setdefault(layout.group, []).append(name)
    names = _names_of_groups(first.groups, [by_group.get(group, []) for group in range(len(first.masters))])
    steps: dict[int, Any] = {}
    for group in first.groups:
        steps.update(dict.fromkeys(group.get("params", ()), group.get("step")))
    states: dict[str, dict[str, Any]] = {}
    for name, layout in layouts.items():
        saved = first.states.get(layout.group)
        if not saved:
            continue
        entry = {}
        for key, value in saved.items():
            if is_flat(value, layout.group):
                entry[key] = layout.merged(f"{name} ({key})", flats[key], value.dtype)
            else:
                entry[key] = value
        if "step" not in entry and steps.get(layout.group) is not None:  # FusedAdam counts in its groups
            entry["step"] = steps[layout.group]
        states[name] = entry
    return _numbered(first.groups, names, states)


def _names_of_groups(groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the parameters of each of the user's groups; in stage 3 a group may have several subgroups."""
    if len(groups) == len(members) and all(len(group.get("params", ())) == 1 for group in groups):
        return [list(names) for names in members]
    return [[name for number in group["params"] for name in members[number]] for group in groups]


def _numbered(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state in torch's layout, with names beside the numbers as torch's own optimizers have them."""
    numbers: dict[str, int] = {}
    result = []
    for group, members in zip(groups, names, strict=True):
        own = {key: value for key, value in group.items() if key not in ("params", "step")}
        own, _ = to_plain(own)
        own["params"] = [numbers.setdefault(name, len(numbers)) for name in members]
        own["param_names"] = list(members)
        result.append(own)
    state = {}
    for name, number in numbers.items():
        if states.get(name):
            # torch counts steps in place: each parameter needs a tensor of its own.
            state[number] = {key: value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value
                             for key, value in states[name].items()}  # fmt: skip
    return {"state": state, "param_groups": result}


def _without_zero(model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return masters and optimizer state of stage 0; the names of masters follow from their values."""
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, dict):
        return {}, None
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if not isinstance(inner, dict) or "param_groups" not in inner:
        return {}, None
    masters = optimizer.get("fp32_groups_flat") or [
        Flat([one.detach() for one in group]) for group in optimizer.get("fp32_groups") or []
    ]
    if not masters:
        plain, _ = to_plain(inner["param_groups"])
        return {}, {"state": inner["state"], "param_groups": plain}
    flats = [one if isinstance(one, Flat) else Flat([one]) for one in masters]
    saved = model["module"]
    left = {name: value for name, value in saved.items() if name not in set(model.get("buffer_names") or ())}
    weights: dict[str, Any] = {}
    names: list[list[str]] = []
    for group, flat in enumerate(flats):
        names.append([])
        at = 0
        while at < flat.size:
            found = _first_equal(left, flat, at)
            if found is None:
                raise Misfit(f"the masters of group {group} are those of no parameter, from element {at} on")
            value = left[found]
            weights[found] = MergedTensor(found, value.shape, flat.pieces(at, value.numel()), torch.float32)
            names[-1].append(found)
            for name in [name for name, other in left.items() if other.data_ptr() == value.data_ptr()]:
                del left[name]
                weights[name] = weights[found]  # tied
            at += value.numel()
    groups, state = inner["param_groups"], inner["state"]
    if all(len(group["params"]) == len(members) for group, members in zip(groups, names, strict=True)):
        numbered = {
            name: state.get(number)
            for group, members in zip(groups, names, strict=True)
            for number, name in zip(group["params"], members, strict=True)
        }
        return weights, _numbered(groups, names, {name: entry for name, entry in numbered.items() if entry})
    # FusedAdam steps one long tensor for each group.
    states: dict[str, dict[str, Any]] = {}
    for group, (number, members) in enumerate(zip([one["params"][0] for one in groups], names, strict=True)):
        entry, at = state.get(number, {}), 0
        for name in members:
            shape, size = weights[name].shape, weights[name].shape.numel()
            states[name] = {
                key: MergedTensor(f"{name} ({key})", shape, Flat([value]).pieces(at, size), value.dtype)
                if isinstance(value, Tensor) and value.numel() >= flats[group].size and value.ndim
                else value
                for key, value in entry.items()
            }
            if "step" not in states[name] and "step" in groups[group]:
                states[name]["step"] = groups[group]["step"]
            at += size
    return weights, _numbered(groups, names, states)


def _first_equal(left: Mapping[str, Tensor], flat: Flat, at: int) -> str | None:
    """Return the first parameter whose 16-bit values are the masters' at a place, rounded."""
    for name, value in left.items():
        pieces = flat.pieces(at, value.numel())
        if sum(piece.numel() for piece in pieces) != value.numel() or not value.numel():
            continue
        master = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if torch.equal(master.to(value.dtype), value.reshape(-1)):
            return name
    return None


# --- names -----------------------------------------------------------------------------------------------------------


def _without_prefix(weights: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return weights without the name of a module that was around the user's, and the changed names."""
    ours = config.get("loopwright") if isinstance(config, dict) else None
    prefix = str(ours["prefix"]) if ours else _LIGHTNING_PREFIX
    if not weights or not all(name.startswith(prefix) for name in weights):
        return weights, {}
    names = {name: name.removeprefix(prefix) for name in weights}
    return {names[name]: value for name, value in weights.items()}, names


def _renamed(optimizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    for group in optimizer["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [names.get(name, name) for name in group["param_names"]]
    return optimizer


def _is_whole(value: Any, like: Any) -> bool:
    """Return whether a buffer is in the model's file, with its dtype, which ds_to_universal does not keep."""
    return isinstance(value, Tensor) and value.shape == like.shape


def _as_float32(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in (torch.float16, torch.bfloat16):
        return value.detach() if isinstance(value, Tensor) else value
    return MergedTensor(name, value.shape, [value.detach().reshape(-1)], torch.float32)


# --- errors ----------------------------------------------------------------------------------------------------------


def _refuse_other_cuts(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    for pattern, what in _CUT_OTHERWISE.items():
        if any(re.fullmatch(pattern, name) for name in names):
            raise _unsupported(folder, what)


def _unsupported(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the DeepSpeed folder {str(folder)!r} was saved with {what}, which is not read.",
        fix="make a universal checkpoint of it with `python -m deepspeed.checkpoint.ds_to_universal` and read that.",
    )


def _damaged(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"the DeepSpeed folder {str(folder)!r} is not whole: {problem}.", fix=_FIX)


def _some(found: Sequence[object]) -> str:
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(map(str, found[:_MAX_NAMED])) + more
