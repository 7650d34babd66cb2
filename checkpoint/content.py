"""Content of a checkpoint: named states, and the keys of the file that store them.

trainer/checkpointing/snapshot.py collects the states and restores them. The field's keys (`state_dict`,
`optimizer_states`, `lr_schedulers`, `callbacks`, `epoch`, `global_step`, hyperparameters) stand at the top, so that any
script can use them; what only Loopwright knows is under one key, `loopwright`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..protocols import StateDict

OWN_KEY = "loopwright"
SCHEMA_VERSION = 1
PARAM_NAMES = "param_names"
LIGHTNING_VERSION_KEY = "pytorch-lightning_version"

# Name of a state -> key of the file.
_FIELD_KEYS = {
    "module": "state_dict",
    "callbacks": "callbacks",
    "optimizers": "optimizer_states",
    "schedulers": "lr_schedulers",
}
_OWN_STATES = (
    "progress",
    "data",
    "rng",
    "rng_of_ranks",
    "rng_places",
    "strategy",
    "settled",
    "metrics",
    "metric_objects",
    "precision",
    "loggers",
    "schedule_progress",
    "optimizer_record",
    "gradients",
    "window",
    "validation_generators",
    "frozen",
    "excluded",
    "unfinished",
    "after_validation",
    "program",
)

# What readers rely on. A type; a tuple of alternatives; a list of one shape for each entry; a dict of shapes by name,
# where "name?" may be missing and "*" stands for any name. Floats may be ints, and are finite. A range has
# what an int may be.
_COUNT, _SIZE = range(2**62), range(1, 2**62)
_RNG = {
    "python": {"version": int, "state": torch.Tensor, "gauss": (float, None)}, "torch": torch.Tensor,
    "numpy?": {"bit_generator": str, "has_gauss?": _COUNT, "gauss?": float,
               "state": {"key?": {"dtype": str, "shape": [int], "data": torch.Tensor}, "pos?": range(2**31)}},
}  # fmt: skip
_PARTS = {"rng?": _RNG, "generators?": {"*": object}, "stateful?": {"*": object}}
_NAMES = [str]
_OWN_SHAPE = {
    "schema": int,
    "versions": {"loopwright": str, "*": str},
    "world_size?": int,
    "progress?": {"*": float},
    "data?": (
        {"is_open?": bool, "epoch?": _COUNT, "position?": _COUNT, "samples?": (_COUNT, None), "pulled?": _COUNT,
         "dataset_length?": (_COUNT, None), "batch_size?": (_SIZE, None), "num_workers?": _COUNT, "rounds?": _COUNT,
         "fingerprint?": {"digest": (int, None), "hash_check": int}, "opening?": _PARTS,
         "current?": (_PARTS, int)},
        None,
    ),
    "rng?": (_RNG, None),
    "rng_of_ranks?": [_RNG],
    "rng_places?": ([[int]], None),
    "strategy?": object,
    "settled?": {"*": object},  # for readers: the automatic choice of a strategy, and why
    "metrics?": (
        {"window": int, "results": {"*": torch.Tensor}, "result_steps": {"*": int}, "progress_bar": {"*": object},
         "slots": [{"hook": str, "loader": object, "key": object}],
         "metric_slots?": [{"hook": str, "metric": str, "key": object}]},
        {"ranks": object},
    ),
    "metric_objects?": (
        {"*": {"update_count": int, "states": {"*": (torch.Tensor, [torch.Tensor])}}},
        [{"*": {"update_count": int, "states": {"*": (torch.Tensor, [torch.Tensor])}}}],
    ),
    "precision?": {"*": object},
    "loggers?": {"*": {"*": object}},
    "schedule_progress?": [int],
    "optimizer_record?": {
        "configured": {"optimizers": [{"class": str, "groups": [{"*": object}]}],
                       "schedules": [{"class": str, "values": {"*": object}}]},
        "names?": [([_NAMES], None)],
    },
    "gradients?": object,
    "window?": object,
    "validation_generators?": {"*": object},
    "frozen?": ({"parameters": _NAMES, "modules": _NAMES}, None),
    "excluded?": _NAMES,
    "unfinished?": {"validation_end?": {"rng_of_ranks": [_RNG], "rng_places?": ([[int]], None)},
                    "told_later?": {"event": str, "callbacks": _NAMES}},
    "after_validation?": ({"*": object}, None),  # a Tensor, or a part of one in a folder
    "program?": {"command": ([str], None), "folder": str, "revision": (str, None), "variables": {"*": str},
                 "threads": int, "ranks_by": str, "fit?": int},
}  # fmt: skip
_COUNTS = {"*": int}
_SHAPE = {
    "state_dict?": {"*": object},
    "callbacks?": {"*": object},
    "optimizer_states?": [{"*": object}],
    "lr_schedulers?": [({"*": object}, None)],  # of a schedule without a state
    "epoch?": int,
    "global_step?": int,
    "hyper_parameters?": ({"*": object}, None),
    "datamodule_hyper_parameters?": ({"*": object}, None),
    "hparams_name?": (str, None),
    "datamodule_hparams_name?": (str, None),
    "hyper_parameters_to_pass?": {"*": object},
    "datamodule_hyper_parameters_to_pass?": {"*": object},
    "loops?": {
        "fit_loop?": {
            "epoch_progress?": {"current?": _COUNTS, "*": object},
            "epoch_loop.batch_progress?": {"current?": _COUNTS, "total?": _COUNTS, "*": object},
            "*": object,
        },
        "*": object,
    },
    f"{OWN_KEY}?": {"*": object},
}
_Shape = Any  # Any: as described above


@dataclass(slots=True)
class Content:
    """The states of a checkpoint by name.

    Attributes:
        states: progress, module, callbacks, optimizers, schedulers, precision, data, rng, metrics, loggers, ...
        extra: Whatever else is at the top of the file: hyperparameters, the data module's state, entries of hooks.
        is_foreign: Whether another library wrote the file, so that only the field's keys are there.
    """

    states: StateDict
    extra: StateDict = field(default_factory=dict)
    is_foreign: bool = False


def write(content: Content, *, epoch: int, global_step: int, world_size: int, version: str) -> StateDict:
    """Return the dict that is saved."""
    unknown = set(content.states) - set(_FIELD_KEYS) - set(_OWN_STATES)
    assert not unknown, f"states without a place in the file: {unknown}"
    checkpoint: StateDict = {"epoch": epoch, "global_step": global_step, "loopwright_version": version}
    for name, key in _FIELD_KEYS.items():
        if name in content.states:
            checkpoint[key] = content.states[name]
    checkpoint.update(content.extra)
    checkpoint[OWN_KEY] = {
        "schema": SCHEMA_VERSION,
        "versions": {"loopwright": version, "torch": str(torch.__version__), "python": platform.python_version()},
        "world_size": world_size,
        **{name: content.states[name] for name in _OWN_STATES if name in content.states},
    }
    return checkpoint


def read(checkpoint: Mapping[str, Any], *, source: str) -> Content:
    """Return the states of a checkpoint of Loopwright, or of one with the field's keys.

    Raises:
        CheckpointError: There is no `state_dict`, or a newer Loopwright wrote the file.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        keys = sorted(map(str, checkpoint))[:10] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise CheckpointError(
            f"{source} has no entry 'state_dict'; it has {keys}.",
            fix="pass a checkpoint of trainer.save_checkpoint, ModelCheckpoint or Lightning; for a bare state dict use "
            "module.load_state_dict(torch.load(path, weights_only=True)).",
        )
    states = {name: checkpoint[key] for name, key in _FIELD_KEYS.items() if key in checkpoint}
    known = {*_FIELD_KEYS.values(), "epoch", "global_step", "loopwright_version", OWN_KEY}
    extra = {key: value for key, value in checkpoint.items() if key not in known}
    require_shape(checkpoint, source)
    own = checkpoint.get(OWN_KEY)
    if own is None:
        states["progress"] = _lightning_progress(checkpoint)
        scaler = checkpoint.get("MixedPrecision") or checkpoint.get("MixedPrecisionPlugin")
        if scaler:
            states["precision"] = scaler
        return Content(states, extra, is_foreign=True)
    states.update({name: own[name] for name in _OWN_STATES if name in own})
    return Content(states, extra)


def require_shape(checkpoint: Mapping[str, Any], source: str) -> None:
    """Check that the entries of a checkpoint have the types that readers rely on.

    Raises:
        CheckpointError: One has another type, or a newer Loopwright wrote the file.
    """
    problem = _misfit(checkpoint, _SHAPE, "")
    own = checkpoint.get(OWN_KEY)
    if problem is None and own is not None:
        schema = own.get("schema")
        if isinstance(schema, int) and schema > SCHEMA_VERSION:
            version = own["versions"].get("loopwright") if isinstance(own.get("versions"), Mapping) else None
            raise CheckpointError(
                f"{source} has the schema version {schema}, this Loopwright reads up to {SCHEMA_VERSION}; "
                f"Loopwright {version} wrote it.",
                fix="install that version or a newer one.",
            )
        problem = _misfit(own, _OWN_SHAPE, OWN_KEY)
    if problem is not None:
        raise CheckpointError(
            f"{source} is altered or was not written by a Trainer: {problem}.",
            fix="use another checkpoint, or take the entry out of the file.",
        )


def _misfit(value: object, shape: _Shape, where: str) -> str | None:
    """Return the first entry that does not have its shape, None if all have."""
    waiting = [(value, shape, where)]  # the next one last
    while waiting:
        value, shape, where = waiting.pop()
        if isinstance(shape, tuple):
            if value is None and None in shape:
                continue
            problem = None
            for one in shape:
                misfit = _misfit(value, one, where)
                if misfit is None:
                    break
                problem = problem or misfit
            else:
                return problem
        elif isinstance(shape, list):
            if not isinstance(value, list | tuple):
                return f"expected a list at {where}, got {_shown(value)}"
            waiting += reversed([(one, shape[0], f"{where}[{index}]") for index, one in enumerate(value)])
        elif isinstance(shape, dict):
            if not isinstance(value, Mapping):
                return f"expected a dict at {where or 'the top'}, got {_shown(value)}"
            if where == "callbacks" and not all(isinstance(key, str) for key in value):
                return (
                    f"expected names at {where}, got {_shown(next(key for key in value if not isinstance(key, str)))}"
                )
            below: list[tuple[object, _Shape, str]] = []
            for name, entry in shape.items():
                key = name.removesuffix("?")
                if name == "*":
                    if entry is not object:
                        others = set(value) - {other.removesuffix("?") for other in shape}
                        below += [(value[other], entry, f"{where}[{other!r}]") for other in others]
                elif key in value:
                    below.append((value[key], entry, f"{where}.{key}" if where else key))
                elif key == name:
                    return f"expected the entry {key} in {where}, got {sorted(map(str, value))[:5]}"
            waiting += reversed(below)
        elif shape is None:
            if value is not None:
                return f"expected None at {where}, got {_shown(value)}"
        elif isinstance(shape, range):
            if not isinstance(value, int) or value not in shape:
                return f"expected an integer of at least {shape.start} at {where}, got {_shown(value)}"
        elif not (
            isinstance(value, int | float) and math.isfinite(value) if shape is float else isinstance(value, shape)
        ):
            return f"expected {shape.__name__} at {where}, got {_shown(value)}"
    return None


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def _lightning_progress(checkpoint: Mapping[str, Any]) -> StateDict:
    """Return the counts in a Lightning checkpoint: the epoch counter of its loops, and its global step."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    current = loop.get("epoch_progress", {}).get("current", {})
    batches = loop.get("epoch_loop.batch_progress", {})
    is_last = bool(batches.get("is_last_batch", True))
    completed = int(current.get("completed", checkpoint.get("epoch", 0)))
    # Saved in on_train_epoch_end or in the validation before it: the epoch's batches are all done.
    if is_last and int(current.get("processed", completed)) > completed:
        completed += 1
    return {
        "epochs": completed,
        "steps": int(checkpoint.get("global_step", 0)),
        "batches_in_epoch": 0 if is_last else int(batches.get("current", {}).get("processed", 0)),
        "total_batches": int(batches.get("total", {}).get("processed", 0)),
        "epoch_open": not is_last,
    }


def fit_by_name(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> StateDict:
    """Return a state with the parameters that an optimizer has, in its order.

    What does not fit, or has no names, comes as it is: the optimizer says what is wrong with it.

    Args:
        state: In torch's layout.
        groups: Names of the optimizer's parameters, by group.
    """
    saved = state.get("param_groups")
    if not isinstance(saved, list) or len(saved) != len(groups) or not all(PARAM_NAMES in group for group in saved):
        return dict(state)
    known = [dict(zip(group[PARAM_NAMES], group["params"], strict=True)) for group in saved]
    if any(set(one) - set(members) for one, members in zip(known, groups, strict=True)):
        return dict(state)
    numbers: dict[str, int] = {}
    entries = {}
    fitted = []
    for group, one, members in zip(saved, known, groups, strict=True):
        own = {key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)}
        own["params"] = [numbers.setdefault(name, len(numbers)) for name in members]
        fitted.append(own)
        for name in members:
            if name in one and one[name] in state["state"]:
                entries[numbers[name]] = state["state"][one[name]]
    return {**state, "state": entries, "param_groups": fitted}
