"""Conversion of checkpoint files from one format to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import CheckpointError, ConfigError
from ...protocols import Advance, StateDict
from ...strategies.base import plain_name
from .. import content
from ..content import LIGHTNING_VERSION_KEY, OWN_KEY, Content
from ..deepspeed.universal import write_universal
from ..file.safetensors_file import write_weights
from ..file.streamed import save_streaming
from ..tensors import is_tensor, tensors_in
from .formats import Opened
from .write_sharded import save_split

FORMATS = ("checkpoint", "sharded", "safetensors", "state-dict", "lightning", "deepspeed")

_SUFFIXES = {".ckpt": "checkpoint", ".safetensors": "safetensors", ".pt": "state-dict", ".pth": "state-dict"}
_KEPT = ("state_dict", "epoch", "global_step", "loopwright_version", LIGHTNING_VERSION_KEY)
_HPARAMS = (
    "hparams_name", "hyper_parameters", "hparams_type", "hyper_parameters_to_pass", "trusted_hyper_parameters",
)  # fmt: skip
_OWN_KEPT = ("schema", "versions", "world_size", "progress", "excluded")
# Whose layout of `loops` is written.
_LIGHTNING_VERSION = "2.6.0"


def guess_format(path: str | Path) -> str:
    """Return the format that a path's suffix names.

    Raises:
        ConfigError: It names none.
    """
    suffix = Path(path).suffix
    if suffix not in _SUFFIXES:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in _SUFFIXES.items())
        raise ConfigError(
            f"{str(path)!r} has the suffix {suffix!r}, and no format was given; known are {known}.",
            fix=f"pass --to with one of {', '.join(FORMATS)}.",
        )
    return _SUFFIXES[suffix]


def write_as(opened: Opened, path: str | Path, to: str, *, num_shards: int = 1, advance: Advance | None = None) -> None:
    """Write a checkpoint in another format; an existing one is replaced when the new one is complete.

    Args:
        opened: What to write.
        path: File, folder or URL.
        to: One of FORMATS. Prefixes that torch.compile adds to names are left out in each.
        num_shards: Number of files that a sharded one is split into.
        advance: Called with the number of bytes whenever some were written.

    Raises:
        CheckpointError: The content does not fit the format, or cannot be written.
    """
    if any(plain_name(name) != name for name in opened.tree.get("state_dict") or ()):
        opened = _with_names(opened, lambda name: plain_name(name) if isinstance(name, str) else name)
    if to == "safetensors":
        write_weights(weights_of(opened), path, advance=advance)
    elif to == "state-dict":
        save_streaming(weights_of(opened), path, advance=advance)
    elif to == "lightning":
        save_streaming(_for_lightning(_as_checkpoint(opened)), path, advance=advance)
    elif to == "deepspeed":
        write_universal(_as_checkpoint(opened), path, advance=advance)
    elif to == "sharded":
        save_split(_as_checkpoint(opened), path, num_shards=num_shards, advance=advance)
    else:
        save_streaming(_as_checkpoint(opened), path, advance=advance)


def weights_of(opened: Opened) -> StateDict:
    """Return the weights by name.

    Raises:
        CheckpointError: There are none; the message says where tensors are.
    """
    weights = opened.tree.get("state_dict")
    if isinstance(weights, dict):
        return weights
    places = sorted({path.rpartition("/")[0] for path, _ in tensors_in(opened.tree)})[:10]
    raise CheckpointError(
        f"{opened.path!r} ({opened.format}) has no entry 'state_dict'; it has tensors under {places or 'nothing'}.",
        fix="say with --weights-key where the weights are.",
    )


def without_training(opened: Opened) -> Opened:
    """Return a checkpoint as trainer.save_checkpoint(weights_only=True) would have written it."""
    keep = {*_KEPT, *_HPARAMS, *(f"datamodule_{name}" for name in _HPARAMS)}
    tree = {key: value for key, value in opened.tree.items() if key in keep}
    own = opened.tree.get(OWN_KEY)
    if isinstance(own, dict):
        tree[OWN_KEY] = {key: own[key] for key in _OWN_KEPT if key in own}
    return Opened(opened.path, opened.format, tree, opened.is_bare, opened.dropped, opened.metadata)


def rename(opened: Opened, prefixes: Sequence[tuple[str, str]]) -> Opened:
    """Return a checkpoint with other names of weights: the first prefix that fits a name is replaced.

    Optimizers know parameters by number, or by name; names are changed there, and in the lists of frozen and
    excluded ones, too.

    Raises:
        ConfigError: A prefix fits no name, or two weights would get one name.
    """
    if not prefixes:
        return opened
    weights = weights_of(opened)
    used: set[str] = set()

    def renamed(name: Any) -> Any:  # Any: a name, or a number
        for old, new in prefixes:
            if isinstance(name, str) and name.startswith(old):
                used.add(old)
                return new + name[len(old) :]
        return name

    names = {name: renamed(name) for name in weights}
    twice = sorted({new for new in names.values() if list(names.values()).count(new) > 1})
    problems = [f"--map {old}={new}: no weight has a name that begins so" for old, new in prefixes if old not in used]
    problems += [f"several weights would be called {name!r}" for name in twice]
    if problems:
        raise ConfigError("; ".join(problems) + f". The names begin with {list(weights)[:3]}.", fix="change --map.")
    return _with_names(opened, renamed)


def _with_names(opened: Opened, renamed: Callable[[Any], Any]) -> Opened:  # Any: a name, or a number
    tree, weights = dict(opened.tree), opened.tree["state_dict"]
    tree["state_dict"] = type(weights)((renamed(name), value) for name, value in weights.items())
    if isinstance(states := tree.get("optimizer_states"), list):
        tree["optimizer_states"] = [_rename_optimizer(state, renamed) for state in states]
    own = tree.get(OWN_KEY)
    if isinstance(own, dict) and isinstance(own.get("frozen"), dict):
        frozen = {**own["frozen"], "parameters": [renamed(name) for name in own["frozen"].get("parameters", [])]}
        own = tree[OWN_KEY] = {**own, "frozen": frozen}
    if isinstance(own, dict) and isinstance(own.get("excluded"), list):
        tree[OWN_KEY] = {**own, "excluded": [renamed(name) for name in own["excluded"]]}
    return Opened(opened.path, opened.format, tree, opened.is_bare, opened.dropped, opened.metadata)


def _rename_optimizer(state: Any, renamed: Callable[[object], Any]) -> object:  # Any: an optimizer's state
    if not isinstance(state, dict) or "state" not in state:
        return state
    groups = [
        {**group, "params": [renamed(name) for name in group.get("params", [])]} for group in state["param_groups"]
    ]
    return {**state, "state": {renamed(name): value for name, value in state["state"].items()}, "param_groups": groups}


def _as_checkpoint(opened: Opened) -> StateDict:
    weights = weights_of(opened)
    if not opened.is_bare:
        return opened.tree
    objects = [name for name, value in weights.items() if not is_tensor(value) and isinstance(value, dict)]
    if objects and not any(is_tensor(value) for value in weights.values()):
        raise CheckpointError(f"{opened.path!r} holds no weights.", fix="say with --weights-key where they are.")
    states = Content({"module": weights, "progress": {"epochs": 0, "steps": 0}})
    return content.write(states, epoch=0, global_step=0, world_size=1, version=__version__)


def _for_lightning(tree: StateDict) -> StateDict:
    """Return the field's keys, with the counts where Lightning looks for them."""
    own = tree.get(OWN_KEY)
    kept = {key: value for key, value in tree.items() if key not in (OWN_KEY, "loopwright_version")}
    kept.setdefault(LIGHTNING_VERSION_KEY, _LIGHTNING_VERSION)
    if isinstance(own, dict):
        kept["loops"] = {"fit_loop": lightning_loop(own.get("progress", {}))}
    return kept


def lightning_loop(progress: StateDict) -> StateDict:
    """Return our counts as the state of Lightning's fit loop."""
    steps, epochs = int(progress.get("steps", 0)), int(progress.get("epochs", 0))
    batches, in_epoch = int(progress.get("total_batches", steps)), int(progress.get("batches_in_epoch", 0))
    is_open = bool(in_epoch)

    def counts(number: int, names: Sequence[str] = ("ready", "completed", "started", "processed")) -> dict[str, int]:
        return dict.fromkeys(names, number)

    def both(total: int, current: int, names: Sequence[str] = ("ready", "completed", "started", "processed")) -> Any:
        return {"total": counts(total, names), "current": counts(current, names)}

    stepped = both(steps, 0, ("ready", "completed"))
    epoch = both(epochs, epochs)
    if is_open:
        for part in epoch.values():
            part.update(ready=epochs + 1, started=epochs + 1)
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": {**both(batches, in_epoch), "is_last_batch": not is_open},
        "epoch_loop.scheduler_progress": both(0, 0, ("ready", "completed")),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": stepped, "zero_grad": both(steps, 0, ("ready", "completed", "started"))}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": both(0, 0, ("ready", "completed")),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**both(0, 0), "is_last_batch": False},
        "epoch_progress": epoch,
    }
