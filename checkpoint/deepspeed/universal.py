"""Writer of DeepSpeed's universal checkpoint, which its engines load in any ZeRO stage with any number of processes.

<path>/latest_universal                      names the subfolder
<path>/universal/mp_rank_00_model_states.pt  counts, buffers, frozen parameters, other entries
<path>/universal/zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
<path>/universal/zero/optimizer_state.pt     parameter groups
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...protocols import Advance, StateDict
from ..content import OWN_KEY, PARAM_NAMES
from ..file import disk
from ..file.remote import as_local
from ..file.streamed import save_streaming
from ..tensors import memory_key
from .files import FULL_MODEL, LATEST_UNIVERSAL, UNIVERSAL, is_deepspeed_folder

# Any in this file: the content of checkpoints.

_TAG = "universal"
_MODEL_OF_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_DEEPSPEED_VERSION = "0.19.8"  # whose layout is written
_LAYOUT_VERSION = 0.2
_NOT_FOR_CLIENTS = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", OWN_KEY)


def write_universal(tree: Mapping[str, object], path: str | Path, *, advance: Advance | None = None) -> None:
    """Write a checkpoint as a folder that DeepSpeed loads with `{"checkpoint": {"load_universal": True}}`.

    Args:
        tree: With the field's keys; the optimizer's state must name its parameters.
        path: The folder; an existing one is replaced when the new one is complete.
        advance: Called with the number of bytes after each write.

    Raises:
        CheckpointError: The checkpoint does not have one optimizer that has made a step and names its parameters;
            or the path is a URL.
    """
    target = as_local(path)
    if target is None:
        raise CheckpointError(
            f"{str(path)!r}: expected a local folder for a checkpoint of DeepSpeed.",
            fix="write it to a local folder and copy it.",
        )
    weights, groups, states = _parts_of(tree)
    if target.is_dir() and any(target.iterdir()) and not is_deepspeed_folder(target):
        raise CheckpointError(f"{str(path)!r} has other content.", fix="pass the path of a new folder.")
    disk.make_folder(target.parent)
    unfinished, replaced = (target.with_name(f".{target.name}.{word}") for word in ("unfinished", "replaced"))
    shutil.rmtree(unfinished, ignore_errors=True)
    if target.exists():  # else `replaced` is what a killed call has left of the old one
        shutil.rmtree(replaced, ignore_errors=True)
    folder = unfinished / _TAG

    def save(content: StateDict, *parts: str) -> None:
        file = folder.joinpath(*parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_streaming(content, file, advance=advance)

    try:
        for name, state in states.items():
            save({"param": weights[name], "cat_dim": 0}, UNIVERSAL, name, "fp32.pt")
            for key, value in state.items():
                if key != "step":
                    save({"param": value, "cat_dim": 0}, UNIVERSAL, name, f"{key}.pt")
            torch.save(state["step"], folder / UNIVERSAL / name / "step.pt")
        step = next(iter(states.values()))["step"]
        own = [{key: value for key, value in group.items() if key not in ("params", PARAM_NAMES)} for group in groups]
        common: StateDict = {
            "param_groups": [{**group, "params": [number]} for number, group in enumerate(own)],
            "ds_version": _DEEPSPEED_VERSION,
        }
        common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": common["param_groups"]}
        save(common, UNIVERSAL, "optimizer_state.pt")
        model = _model(tree, weights, groups, states)
        save(model, FULL_MODEL)
        save({**model, "module": {}}, _MODEL_OF_STAGE_3)
        (unfinished / LATEST_UNIVERSAL).write_text(_TAG, encoding="utf-8")
        if target.is_dir():  # a kill between these two leaves the old one, complete, beside it
            target.rename(replaced)
        unfinished.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{str(path)!r} could not be written: {error.strerror or error}.", fix="check the disk and the folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _parts_of(tree: Mapping[str, Any]) -> tuple[StateDict, list[StateDict], dict[str, StateDict]]:
    """Return weights, the optimizer's groups, and its states by names of parameters.

    Raises:
        CheckpointError: With everything that is missing.
    """
    weights = tree.get("state_dict") or {}
    optimizers = tree.get("optimizer_states") or []
    if len(optimizers) != 1:
        raise CheckpointError(
            f"Expected a checkpoint with one optimizer for a folder of DeepSpeed, got {len(optimizers)}.",
            fix="write weights for DeepSpeed with --to state-dict, and load them into the module.",
        )
    groups, saved = optimizers[0]["param_groups"], optimizers[0]["state"]
    if not all(PARAM_NAMES in group for group in groups):
        raise CheckpointError(
            "the checkpoint's optimizer numbers its parameters, and a folder of DeepSpeed needs their names.",
            fix="build the optimizer with torch.optim.AdamW(module.named_parameters(), ...) in the run that saves; or "
            "let DeepSpeed save: trainer.strategy.deepspeed_engine.save_checkpoint(folder).",
        )
    states: dict[str, StateDict] = {}
    for group in groups:
        for number, name in zip(group["params"], group[PARAM_NAMES], strict=True):
            entry = saved.get(number)
            if entry:
                states[name] = {key: value for key, value in entry.items() if value is not None}
    problems = [] if states else ["its optimizer has made no step"]
    problems += [f"it has no weight {name!r}" for name in states if name not in weights]
    problems += [f"its optimizer counts no steps for {name!r}" for name, one in states.items() if "step" not in one]
    steps = {float(one["step"]) for one in states.values() if "step" in one}
    if len(steps) > 1:
        problems.append(f"its parameters were stepped {sorted(steps)} times, and DeepSpeed keeps one count")
    if problems:
        raise CheckpointError(
            f"a folder of DeepSpeed cannot be made of the checkpoint: {'; '.join(problems[:5])}.",
            fix="write weights for DeepSpeed with --to state-dict, and load them into the module.",
        )
    return weights, groups, states


def _model(
    tree: Mapping[str, Any], weights: Mapping[str, Any], groups: list[StateDict], states: Mapping[str, object]
) -> StateDict:
    trained = {memory_key(weights[name]): name for name in states}
    shared = {
        name: trained[memory_key(value)]
        for name, value in weights.items()
        if name not in states and memory_key(value) in trained
    }
    own = tree.get(OWN_KEY)
    frozen = set(own.get("frozen", {}).get("parameters", ())) if isinstance(own, dict) else set()
    schedules = tree.get("lr_schedulers") or []
    steps = int(tree.get("global_step") or 0)
    client = {key: value for key, value in tree.items() if key not in _NOT_FOR_CLIENTS}
    return {
        **client,
        "module": dict(weights),
        "buffer_names": [name for name in weights if name not in states and name not in shared and name not in frozen],
        "optimizer": None,
        "param_shapes": [
            {name: torch.Size(weights[name].shape) for name in group[PARAM_NAMES] if name in states} for group in groups
        ],
        "frozen_param_shapes": {name: torch.Size(weights[name].shape) for name in weights if name in frozen},
        "frozen_param_fragments": {name: weights[name] for name in weights if name in frozen},
        "shared_params": shared,
        "lr_scheduler": schedules[0] if len(schedules) == 1 else None,
        "skipped_steps": 0,
        "global_steps": steps,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _DEEPSPEED_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _LAYOUT_VERSION},
    }
