"""`describe`: the content of a checkpoint in numbers and names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .. import sharded
from ..content import LIGHTNING_VERSION_KEY, OWN_KEY, SCHEMA_VERSION
from ..file.remote import as_local
from ..tensors import is_tensor, memory_key, size_bytes, tensors_in
from .formats import Opened

_FIELD = {
    "epoch", "global_step", "loopwright_version", "state_dict", "callbacks", "optimizer_states", "lr_schedulers",
    "loops", "hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters",
    "datamodule_hparams_name", "datamodule_hparams_type", LIGHTNING_VERSION_KEY, OWN_KEY,
}  # fmt: skip


def describe(opened: Opened) -> dict[str, object]:  # JSON
    """Return what a checkpoint records about itself, as values that JSON can hold; unknown values are left out."""
    tree = opened.tree
    own = tree.get(OWN_KEY) if isinstance(tree.get(OWN_KEY), dict) else {}
    assert isinstance(own, dict)
    found: dict[str, Any] = {  # Any: JSON
        "path": opened.path,
        "form": opened.format,
        "size_bytes": disk_bytes(opened.path),
        "written_by": _written_by(opened, own),
        "counts": _counts(tree, own),
        "weights": _weights(tree.get("state_dict")),
        "optimizers": [_optimizer(state) for state in _list(tree.get("optimizer_states"))],
        "schedulers": [_plain_entries(state) for state in _list(tree.get("lr_schedulers"))],
        "callbacks": [str(key) for key in tree["callbacks"]] if isinstance(tree.get("callbacks"), dict) else [],
        "hyper_parameters": _plain_entries(tree.get("hyper_parameters")),
        "datamodule_hyper_parameters": _plain_entries(tree.get("datamodule_hyper_parameters")),
        "data": _data_position(own.get("data")),
        "states": [str(key) for key in own if key not in ("schema", "versions", "world_size")],
        "other_entries": [] if opened.is_bare else [str(key) for key in tree if key not in _FIELD],
        "left_out": opened.dropped,
        "metadata": opened.metadata,
    }
    return {key: value for key, value in found.items() if value not in (None, [], {}, "")}


def describe_tensors(opened: Opened, prefix: str = "") -> list[dict[str, Any]]:  # Any: JSON
    """Return path, shape, dtype and bytes of tensors whose path begins with `prefix`; `same_as` where one is tied."""
    first: dict[object, str] = {}
    found = []
    for path, tensor in tensors_in(opened.tree):
        if not path.startswith(prefix):
            continue
        name = str(tensor.dtype).removeprefix("torch.")
        entry = {"path": path, "shape": list(tensor.shape), "dtype": name, "size_bytes": size_bytes(tensor)}
        same = first.setdefault(memory_key(tensor), path)
        found.append(entry if same == path else {**entry, "same_as": same})
    return found


def disk_bytes(path: str | Path) -> int | None:
    """Return the bytes that a checkpoint takes on disk; None for a remote one."""
    local = as_local(path)
    if local is None or not local.exists():
        return None
    if local.is_dir():
        return sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    return local.stat().st_size


def _written_by(opened: Opened, own: Mapping[str, object]) -> dict[str, object]:  # JSON
    tree = opened.tree
    found: dict[str, Any] = {}  # Any: JSON
    versions = own.get("versions")
    if isinstance(versions, dict):
        found.update({str(name): str(version) for name, version in versions.items()})
    if LIGHTNING_VERSION_KEY in tree:
        found["lightning"] = str(tree[LIGHTNING_VERSION_KEY])
    if "schema" in own:
        found["schema"] = own["schema"]
        if isinstance(own["schema"], int) and own["schema"] > SCHEMA_VERSION:
            found["schema_note"] = f"newer than this Loopwright reads (up to {SCHEMA_VERSION})"
    if "world_size" in own:
        found["world_size"] = own["world_size"]
    if opened.format == "sharded checkpoint":
        try:
            manifest = sharded.read_manifest(opened.path)
        except CheckpointError:
            return found
        found["format_version"] = manifest.format_version
        found["files"] = len(manifest.files)
        found["saved_by_ranks"] = manifest.world_size
        found["sharded_tensors"] = len(manifest.tensors)
        if manifest.mesh is not None:
            names = manifest.mesh.dim_names
            found["mesh"] = {"shape": list(manifest.mesh.shape), "dims": list(names) if names else None}
    return found


def _counts(tree: Mapping[str, Any], own: Mapping[str, object]) -> dict[str, object]:  # Any: JSON
    found = {key: tree[key] for key in ("epoch", "global_step") if isinstance(tree.get(key), int)}
    progress = own.get("progress")
    if isinstance(progress, dict):
        names = ("epochs", "batches_in_epoch", "total_batches", "samples", "tokens", "skipped_steps")
        found.update({name: progress[name] for name in names if progress.get(name)})
    return found


def _weights(weights: object) -> dict[str, object]:  # whatever stands under state_dict; JSON
    if not isinstance(weights, dict):
        return {}
    by_dtype: dict[str, dict[str, int]] = {}
    seen: set[object] = set()
    tied = 0
    for _, tensor in tensors_in(weights):
        memory = memory_key(tensor)
        if memory in seen:
            tied += 1
            continue
        seen.add(memory)
        entry = by_dtype.setdefault(str(tensor.dtype).removeprefix("torch."), {"elements": 0, "size_bytes": 0})
        entry["elements"] += tensor.shape.numel()
        entry["size_bytes"] += size_bytes(tensor)
    return {
        "tensors": len(seen) + tied,
        "tied": tied,
        "elements": sum(entry["elements"] for entry in by_dtype.values()),
        "size_bytes": sum(entry["size_bytes"] for entry in by_dtype.values()),
        "by_dtype": by_dtype,
    }


# Which optimizers keep these per parameter; a state does not name its class.
_KINDS = (
    ({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "Adam or AdamW with amsgrad"),
    ({"exp_avg", "exp_avg_sq"}, "Adam, AdamW or alike"),
    ({"exp_avg", "exp_inf"}, "Adamax"),
    ({"momentum_buffer"}, "SGD with momentum, or Muon"),
    ({"square_avg"}, "RMSprop"),
    ({"sum"}, "Adagrad"),
    ({"square_avg", "acc_delta"}, "Adadelta"),
)


def _optimizer(state: Any) -> dict[str, object]:  # Any: an optimizer's state; JSON
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        return {"note": "its state has no parameter groups"}
    states = [entry for entry in state.get("state", {}).values() if isinstance(entry, dict)]
    keys = {str(key) for entry in states for key in entry} - {"step"}
    kind = next((name for names, name in _KINDS if names == keys), None)
    groups = [
        {**_plain_entries(group), "params": len(group.get("params", []))}
        for group in state["param_groups"]
        if isinstance(group, dict)
    ]
    total = sum(size_bytes(tensor) for entry in states for tensor in entry.values() if is_tensor(tensor))
    found = {"looks_like": kind, "keeps": sorted(keys), "parameters_with_state": len(states), "size_bytes": total}
    return {**{key: value for key, value in found.items() if value not in (None, [])}, "groups": groups}


def _plain_entries(value: object) -> dict[str, object]:  # a dict of plain values and tensors; JSON
    if not isinstance(value, Mapping):
        return {}
    return {str(key): _json(entry) for key, entry in value.items() if key not in ("params", "param_names")}


def _json(value: object) -> object:  # a plain value; JSON
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_tensor(value):
        return f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return {str(key): _json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json(entry) for entry in value]
    return repr(value)


def _data_position(value: object) -> dict[str, object]:  # the state of the data stream; JSON
    """Return the numbers and names at the top of the data's state; the states of generators below are long."""
    if not isinstance(value, dict):
        return {}
    return {str(key): entry for key, entry in value.items() if isinstance(entry, bool | int | float | str)}


def _list(value: object) -> list[object]:  # whatever stands there
    return value if isinstance(value, list) else []
