"""Folders of `save_state`: Accelerate's file names, with tensors and plain values only, beside a note of what they are.

Accelerate reads these folders, and folders of Accelerate are read here with a reader that executes nothing in them.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...checkpoint import require_plain
from ...checkpoint.file.reading import require_small
from ...checkpoint.file.safetensors_file import read_weights, write_weights
from ...checkpoint.tensors import read_tensor
from ...errors import CheckpointError, ConfigError
from .operations import extract_model_from_parallel
from .state import PartialState

if TYPE_CHECKING:
    from .accelerator import Accelerator

# Any in this file: state dicts.

SCALER_NAME, RNG_STATE_NAME, SAMPLER_NAME = "scaler.pt", "random_states", "sampler"
OPTIMIZER_NAME, SCHEDULER_NAME, MODEL_NAME, SAFE_MODEL_NAME = "optimizer", "scheduler", "pytorch_model", "model"
WEIGHTS_NAME, SAFE_WEIGHTS_NAME = f"{MODEL_NAME}.bin", f"{SAFE_MODEL_NAME}.safetensors"
WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json", f"{SAFE_WEIGHTS_NAME}.index.json"
NOTE = "loopwright.json"
"""The note beside the files."""


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object on rank 0, with torch.save, or tensors as safetensors.

    Args:
        obj: The object.
        f: The file.
        save_on_each_node: Whether local rank 0 of each machine writes it.
        safe_serialization: Whether it is a dict of tensors, to be written as safetensors.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        write_weights({name: value.detach().contiguous() for name, value in obj.items()}, Path(f))
    else:
        torch.save(obj, f)


def write_state(accelerator: Accelerator, folder: Path, *, weights: list[Any], is_safe: bool) -> None:
    """Write the state of everything that was prepared. Called on all processes.

    Raises:
        CheckpointError: A state holds objects other than tensors and plain values.
    """
    fabric, on_each = accelerator.fabric, accelerator.project_configuration.save_on_each_node
    for index, state in enumerate(weights):
        name = SAFE_WEIGHTS_NAME if is_safe else WEIGHTS_NAME
        save(state, folder / _numbered(name, index), on_each, safe_serialization=is_safe)
    for name, one in _objects(accelerator).items():
        state = one.state_dict()
        require_plain(state, f"state for {name}")
        save(state, folder / name, on_each)
    # The random states and counter of each process, as Accelerate reads them.
    torch.save(_random_states(accelerator.step), folder / f"{RNG_STATE_NAME}_{fabric.global_rank}.pkl")
    if fabric.is_global_zero:
        note = {
            "written_by": "loopwright.compat.accelerate", "num_processes": fabric.world_size,
            "holds": "tensors and plain values: every file opens with torch.load(weights_only=True) or safetensors",
        }  # fmt: skip
        (folder / NOTE).write_text(json.dumps(note, indent=1))
    fabric.barrier()


def read_state(accelerator: Accelerator, folder: Path, models: list[Any], load_kwargs: Mapping[str, Any]) -> None:
    """Load a folder of this layer or of Accelerate into everything that was prepared. Called on all processes.

    Args:
        accelerator: Has the objects.
        folder: The folder.
        models: Those whose weights are loaded.
        load_kwargs: Arguments of `load_state_dict` of modules.

    Raises:
        CheckpointError: A file is missing or cannot be read, or does not fit.
    """
    fabric = accelerator.fabric
    found = sorted(path.name for path in folder.glob("custom_checkpoint_*.pkl"))
    if len(found) != len(accelerator.custom):
        raise CheckpointError(
            f"Expected as many custom states in {str(folder)!r} as objects of register_for_checkpointing, got "
            f"{len(found)} and {len(accelerator.custom)}.",
            fix="register the same objects, in the same order, as the program that saved the folder.",
        )
    for index, model in enumerate(models):
        load_weights(extract_model_from_parallel(model), _weights_file(folder, index), load_kwargs)
    for name, one in _objects(accelerator).items():
        one.load_state_dict(read_plain(folder / name))
    states = folder / f"{RNG_STATE_NAME}_{fabric.global_rank}.pkl"
    if states.exists():  # not for a rank that the run which saved it did not have
        accelerator.step = _restore_random_states(read_plain(states))


def load_weights(module: nn.Module, file: Path, load_kwargs: Mapping[str, Any]) -> None:
    """Load a file of weights; names of a shared parameter that Accelerate left out are not missing."""
    if file.suffix == ".safetensors":
        state: Any = {name: read_tensor(stored) for name, stored in read_weights(file)[0].items()}
    else:
        state = read_plain(file)
    # Accelerate saves a module of several processes with the names of its wrapper.
    if state and all(name.startswith("module.") for name in state) and not hasattr(module, "module"):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    own = module.state_dict()
    first = {id_of(own[name]): name for name in state if isinstance(own.get(name), Tensor)}
    state |= {
        name: state[first[id_of(value)]]
        for name, value in own.items()
        if name not in state and isinstance(value, Tensor) and value.numel() and id_of(value) in first
    }
    module.load_state_dict(state, **load_kwargs)


def id_of(tensor: Tensor) -> tuple[int, object]:
    """Return what tensors that share their memory and shape have in common."""
    return tensor.data_ptr(), tensor.shape


def read_plain(path: Path) -> Any:
    """Return the content of a file of torch.save that holds tensors, arrays of numbers and plain values.

    Raises:
        CheckpointError: The file is missing or damaged, or names anything else, which would be executed.
    """
    arrays: list[Any] = []
    if "numpy" in sys.modules:
        import numpy

        # What an array is pickled as, from a module that numpy keeps private: the function that makes it, then types.
        arrays = [numpy.empty(0).__reduce__()[0], numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
    try:
        with open(path, "rb") as file, torch.serialization.safe_globals(arrays):
            require_small(file, str(path))
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{str(path)!r} cannot be read without executing what it holds: {type(error).__name__}: {reason}",
            fix="copy the file again, or save tensors and plain values in state_dict(); a file that you trust can be "
            "converted with torch.load(weights_only=False).",
        ) from error


def next_folder(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the new folder of `save_state`; with automatic names, old ones are removed first."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ConfigError(
                "Expected a folder for save_state, got None without automatic names.",
                fix="pass save_state(folder), or ProjectConfiguration(automatic_checkpoint_naming=True).",
            )
        return Path(output_dir)
    parent = Path(str(accelerator.project_dir)) / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    folders = sorted(parent.iterdir(), key=_number_of)
    chosen = parent / f"checkpoint_{project.iteration}"
    if chosen.exists():
        raise ValueError(f"{chosen} exists: set project_configuration.iteration to the number of the next checkpoint.")
    accelerator.wait_for_everyone()
    if project.total_limit is not None and accelerator.is_main_process:
        for old in folders[: max(0, len(folders) + 1 - project.total_limit)]:
            shutil.rmtree(old)
    return chosen


def last_folder(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of `load_state`: the given one, or the last of automatic names."""
    if input_dir is None:
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError("Expected a folder for load_state, got None without automatic names.")
        folders = sorted((Path(str(accelerator.project_dir)) / "checkpoints").iterdir(), key=_number_of)
        return folders[-1]
    folder = Path(input_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"Tried to find {input_dir} but folder does not exist")
    return folder


def _objects(accelerator: Accelerator) -> dict[str, Any]:
    """Return the objects whose states are files of torch.save: name -> object."""
    kinds = {"optimizer.bin": accelerator.optimizers, "scheduler.bin": accelerator.schedulers}
    objects = {_numbered(kind, index): one for kind, several in kinds.items() for index, one in enumerate(several)}
    objects |= {f"custom_checkpoint_{index}.pkl": one for index, one in enumerate(accelerator.custom)}
    return objects | ({} if accelerator.scaler is None else {SCALER_NAME: accelerator.fabric.precision})


def _number_of(folder: Path) -> int:
    return int((re.findall(r"\d+", folder.name) or [-1])[-1])


def _numbered(name: str, index: int) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}_{index}.{ending}" if index else name


def _weights_file(folder: Path, index: int) -> Path:
    safe = folder / _numbered(SAFE_WEIGHTS_NAME, index)
    return safe if safe.exists() else folder / _numbered(WEIGHTS_NAME, index)


def _random_states(step: int) -> dict[str, Any]:
    states: dict[str, Any] = {
        "step": step, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state(),
    }  # fmt: skip
    if "numpy" in sys.modules:
        import numpy

        state: Any = numpy.random.get_state()
        states["numpy_random_seed"] = (state[0], state[1].tolist(), *state[2:])
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: Mapping[str, Any]) -> int:
    random.setstate(states["random_state"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "numpy_random_seed" in states and "numpy" in sys.modules:
        import numpy

        numpy.random.set_state(states["numpy_random_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
    return int(states.get("step", 0))
