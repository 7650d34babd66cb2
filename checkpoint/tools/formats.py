"""`open_checkpoint`: the content of a checkpoint of any format, as convert, diff and inspect expect it.

Nothing in a file is executed, unless the caller trusts it, and tensors stay on disk.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...protocols import StateDict
from .. import storage
from ..content import LIGHTNING_VERSION_KEY, OWN_KEY, require_shape
from ..deepspeed.folder import read_folder
from ..file.remote import as_local
from ..file.restricted import load_replacing
from ..file.safetensors_file import read_weights
from ..formats import find_format
from ..plain import has_unopened
from ..sharded.manifest import MANIFEST
from ..tensors import is_tensor, tensors_in
from ..to_plain import to_plain
from .dcp_folder import METADATA, DcpFolder

LIGHTNING_EXTRA = "meta.pt"
SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors")

_OPTIMIZER_KEY = re.compile(r"optimizer_(\d+)")
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading a checkpoint.

    Attributes:
        trust: Whether to unpickle what cannot be read safely, which can run any code.
        drop_objects: Whether to leave out entries that are not plain values, instead of raising an error.
        weights_key: Where the weights are in a file of another program: `model`, or `ema/model`; None to look.
        verify: Whether to compare the checksums of the full checkpoint first.
    """

    trust: bool = False
    drop_objects: bool = False
    weights_key: str | None = None
    verify: bool = True


@dataclass(slots=True)
class Opened:
    """A checkpoint of any format.

    Attributes:
        path: As the user passed it.
        format: "checkpoint", "sharded checkpoint", "Lightning checkpoint", "Lightning sharded checkpoint",
            "DCP folder", "DeepSpeed folder", "DeepSpeed universal folder", "state dict", "safetensors", or "file of
            torch.save".
        tree: The content with the field's keys; weights alone are under `state_dict`. Tensors may not be read yet.
        is_bare: Whether there are weights only, without the keys around them.
        dropped: Paths of entries that were left out, since they are not plain values.
        metadata: Of a safetensors file; of a folder of DeepSpeed its version, the ZeRO stage and the number of ranks.
    """

    path: str
    format: str
    tree: StateDict
    is_bare: bool = False
    dropped: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)


def open_checkpoint(path: str | Path, how: Reading) -> Opened:
    """Return the content of a checkpoint of any format that Loopwright knows.

    Raises:
        CheckpointNotFound: There is nothing at the path.
        CheckpointError: It is damaged, unknown, or cannot be read safely.
    """
    local = as_local(path)
    found = find_format(path)
    if found is not None and found.name == "deepspeed":
        return _open_deepspeed(Path(path) if local is None else local, how)
    if found is not None:
        loaded = found.reader.load(path, lazy=True, verify=how.verify)
        return _classified(Opened(str(path), f"{found.name} checkpoint", loaded), how)
    if local is not None and local.is_dir():
        return _open_dcp(local, how)
    if local is not None and is_safetensors(local):
        weights, metadata = read_weights(local)
        return Opened(str(path), "safetensors", {"state_dict": weights}, is_bare=True, metadata=metadata)
    if local is None and str(path).endswith(".safetensors"):
        raise CheckpointError(f"{str(path)!r}: safetensors are read from local files only.", fix="copy it here first.")
    dropped: list[str] = []
    tree = _read_torch(path, how, dropped)
    _refuse_dropped(str(path), dropped, how)
    return _classified(Opened(str(path), "file of torch.save", tree, dropped=dropped), how)


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints directly in a folder, by name: files by suffix, and checkpoint folders; no hidden ones."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if not entry.name.startswith(".")
        and ((entry.is_file() and entry.suffix in SUFFIXES) or is_checkpoint_folder(entry))
    )


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a path is a folder of a format that `open_checkpoint` reads."""
    return path.is_dir() and (find_format(path) is not None or is_dcp_folder(path))


def is_dcp_folder(path: Path) -> bool:
    """Return whether a path is a folder of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def is_safetensors(path: Path) -> bool:
    """Return whether a file begins as safetensors do, or says so by its name and begins as no other."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(9)
    is_header = begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") + 8 <= path.stat().st_size
    return is_header or (path.suffix == ".safetensors" and begin[:2] != b"PK")


def _read_torch(path: str | Path, how: Reading, dropped: list[str]) -> StateDict:
    local = as_local(path)
    is_zip = True
    if local is not None and local.is_file():
        with open(local, "rb") as file:
            is_zip = file.read(2) == b"PK"
    try:
        loaded = storage.load(path, mmap=is_zip, verify=how.verify)
        if local is None or not has_unopened(loaded):
            return loaded
    except CheckpointError as error:
        if local is None or not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
    found = _load_with_objects(local, how, is_zip=is_zip)
    plain, left_out = to_plain(found)
    dropped.extend(left_out)
    return plain if isinstance(plain, dict) else {}


def _load_with_objects(file: Any, how: Reading, *, is_zip: bool) -> object:  # Any: path or file; whatever it holds
    with warnings.catch_warnings():  # about pickle protocols and old storages, which do not matter here
        warnings.simplefilter("ignore")
        if how.trust:
            return torch.load(file, map_location="cpu", weights_only=False, mmap=is_zip)
        try:
            return load_replacing(file, mmap=is_zip)
        except Exception as error:  # the objects were inert, and what used them may fail in any way
            raise CheckpointError(
                f"{file!s} holds objects that cannot be left out: {type(error).__name__}: {error}",
                fix="pass --trust, only if you trust its author: this can run any code.",
            ) from error


def _refuse_dropped(shown: str, dropped: list[str], how: Reading) -> None:
    if not dropped or how.drop_objects:
        return
    more = f", and {len(dropped) - _MAX_NAMED} more" if len(dropped) > _MAX_NAMED else ""
    raise CheckpointError(
        f"{shown!r} has {len(dropped)} entries that are not tensors or plain values: "
        f"{', '.join(dropped[:_MAX_NAMED])}{more}.",
        fix="pass --drop-objects to leave them out"
        + ("." if how.trust else ", or --trust if you trust the author of the file: this can run any code."),
    )


def _classified(opened: Opened, how: Reading) -> Opened:
    tree = opened.tree
    is_file = opened.format == "file of torch.save"
    if how.weights_key is not None:
        opened.tree = {"state_dict": _at(opened, how.weights_key)}
        opened.is_bare = True
    elif is_file and OWN_KEY in tree and "state_dict" in tree:
        require_shape(tree, opened.path)
        opened.format = "checkpoint"
    elif is_file and LIGHTNING_VERSION_KEY in tree and "state_dict" in tree:
        opened.format = "Lightning checkpoint"
    elif "state_dict" not in tree and any(is_tensor(value) for value in tree.values()):
        opened.format = "state dict" if is_file else opened.format
        opened.tree, opened.is_bare = {"state_dict": tree}, True
    return opened


def _at(opened: Opened, key: str) -> StateDict:
    found: Any = opened.tree  # Any: see Opened.tree
    for step in key.split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    if not isinstance(found, dict) or not any(is_tensor(value) for value in found.values()):
        keys = sorted({path.rpartition("/")[0] for path, _ in tensors_in(opened.tree)})[:_MAX_NAMED]
        raise CheckpointError(
            f"{opened.path!r} has no weights under {key!r}; it has tensors under {keys}.",
            fix="pass one of these as --weights-key.",
        )
    return found


def _open_deepspeed(path: Path, how: Reading) -> Opened:
    if how.verify:
        storage.verify(path)
    folder = read_folder(path)
    if folder.dropped and how.trust:
        raise CheckpointError(
            f"{str(path)!r}: objects in DeepSpeed's files are never unpickled here, not with --trust either.",
            fix="pass --drop-objects to leave them out, and see which they are.",
        )
    _refuse_dropped(str(path), folder.dropped, how)
    opened = Opened(str(path), folder.form, folder.tree, dropped=folder.dropped, metadata=folder.metadata)
    return _classified(opened, how)


def _open_dcp(path: Path, how: Reading) -> Opened:
    if not is_dcp_folder(path):
        names = [entry.name for entry in find_checkpoints(path)][:5]
        raise CheckpointError(
            f"{str(path)!r} is a folder without {sharded_mark()} or {METADATA}: not a checkpoint, or one whose save "
            f"did not finish.{' It holds ' + ', '.join(names) + '.' if names else ''}",
            fix="pass the path of a checkpoint.",
        )
    dropped: list[str] = []

    def read_object(file: io.BytesIO, where: str) -> object:  # whatever was saved
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            file.seek(0)
            plain, left_out = to_plain(_load_with_objects(file, how, is_zip=False), where)
            dropped.extend(left_out)
            return plain

    tree = DcpFolder(path).tree(read_object)
    extra = path / LIGHTNING_EXTRA
    is_lightning = extra.is_file()
    if is_lightning:
        tree.update(_read_torch(extra, how, dropped))
    _refuse_dropped(str(path), dropped, how)
    name = "Lightning sharded checkpoint" if is_lightning else "DCP folder"
    if how.weights_key is None:
        _rename_as_field(tree)
    return _classified(Opened(str(path), name, tree, dropped=dropped), how)


def sharded_mark() -> str:
    """Return the name of the file that makes a folder a sharded checkpoint."""
    return MANIFEST


def _rename_as_field(tree: StateDict) -> None:
    """Rename the parts of a sharded checkpoint to the field's keys, in place."""
    model = tree.get("model")
    if "state_dict" not in tree and isinstance(model, dict) and any(map(is_tensor, model.values())):
        tree["state_dict"] = tree.pop("model")
    numbers = sorted(int(found[1]) for key in tree if (found := _OPTIMIZER_KEY.fullmatch(key)))
    if numbers:
        tree["optimizer_states"] = [_by_number(tree.pop(f"optimizer_{number}")) for number in numbers]


def _by_number(state: Any) -> object:  # Any: an optimizer's state
    """Return an optimizer's state with parameters by number, in the order of the groups, where it has names."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return state
    names = [name for group in groups for name in group["params"]]
    # DCP makes text of the keys of dicts: a number in `params` is text in `state`.
    numbers = {str(name): number for number, name in enumerate(names)}
    states = state.get("state", {})
    if not set(states) <= set(numbers):
        return state
    return {
        **state,
        "state": {numbers[name]: value for name, value in sorted(states.items(), key=lambda item: numbers[item[0]])},
        "param_groups": [{**group, "params": [numbers[str(name)] for name in group["params"]]} for group in groups],
    }
