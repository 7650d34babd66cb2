"""Runs a program for Lightning with limits, and writes down what happens: one line of JSON for each event.

    python recorder.py RECORD STEPS PROGRAM.py ARGS
    python recorder.py RECORD STEPS -m MODULE ARGS

The same file runs under Lightning, in an environment that may have no Loopwright, and under Loopwright: it imports
nothing of either by another name than Lightning's. Methods of the program's classes are wrapped; no callback or logger
is added to a Trainer.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any  # Any in this file: objects of the program and of either library

__all__ = ["main"]

_STAGES = ("train", "validation", "test", "predict")
_SHARED = [
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_validation_start",
    "on_validation_end", "on_test_start", "on_test_end", "on_predict_start", "on_predict_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_save_checkpoint", "on_load_checkpoint",
]  # fmt: skip
_OF_STAGES = [f"on_{stage}_{what}" for stage in _STAGES for what in ("epoch_start", "epoch_end")]
_OF_BATCHES = [f"on_{stage}_batch_{what}" for stage in _STAGES for what in ("start", "end")]
_STEPS = ["training_step", "validation_step", "test_step", "predict_step"]
_DATA = [
    "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device",
    "on_exception",
]  # fmt: skip
HOOKS = {
    "module": [
        *_STEPS, *_SHARED, *_OF_STAGES, *_OF_BATCHES, *_DATA, "configure_optimizers", "configure_callbacks",
        "configure_model", "configure_sharded_model", "configure_gradient_clipping", "optimizer_step",
        "optimizer_zero_grad", "lr_scheduler_step", "backward", "on_validation_model_eval",
        "on_validation_model_train", "on_test_model_eval", "on_test_model_train", "on_predict_model_eval",
        "on_predict_model_train", "on_validation_model_zero_grad",
    ],
    "datamodule": [*_DATA, "on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict"],
    "callback": [
        *_SHARED, *_OF_STAGES, *_OF_BATCHES, "on_sanity_check_start", "on_sanity_check_end", "on_exception",
    ],
}  # fmt: skip
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "loopwright", "torch", "builtins", "abc")
_VERBS = ("fit", "validate", "test", "predict")


class _EnoughError(BaseException):
    """Ends a program on Fabric after its first steps."""


class Recorder:
    """Writes events, and knows the verb that runs.

    Args:
        path: The file.
        steps: How many training steps each fit makes.
    """

    def __init__(self, path: str, steps: int) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
        self._steps = steps
        self._root = Path.cwd()
        self._trainer: Any = None
        self._verb = ""
        self._verbs = 0
        self._clock = 0
        self._inside: set[tuple[int, str]] = set()
        self._limits: dict[int, _Limit] = {}  # of each Trainer
        self._files: dict[str, tuple[int, int]] = {}
        self._backward = 0

    def write(self, kind: str, name: str, **values: Any) -> None:
        """Write an event.

        Args:
            kind: What is compared with what: "hook", "batch", "result", "weights", "rates", "row", "checkpoint",
                "metrics", or one of those that are not compared.
            name: What it is about.
            values: What is compared.
        """
        event = {"kind": kind, "name": name, "verb": self._verbs, "clock": self._clock, "values": values}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    # --- what is wrapped -------------------------------------------------------------------------------------------

    def watch_library(self) -> list[str]:
        """Wrap the Trainers, Fabrics and Tuners that can be imported, and return the packages."""
        found = []
        for package in ("lightning.pytorch", "pytorch_lightning"):
            if not _exists(package):
                continue
            found.append(package)
            module = importlib.import_module(package)
            if hasattr(module.Trainer.fit, "is_watched"):
                continue  # both names mean one class
            self._wrap(module.Trainer, "__init__", self._make_trainer)
            for verb in _VERBS:
                self._wrap(module.Trainer, verb, functools.partial(self._run_verb, verb))
            tuner = importlib.import_module(f"{package}.tuner").Tuner
            for verb in ("lr_find", "scale_batch_size"):
                self._wrap(tuner, verb, functools.partial(self._run_verb, verb))
        for package in ("lightning.fabric", "lightning_fabric"):
            if _exists(package):
                fabric = importlib.import_module(package).Fabric
                if not hasattr(fabric.backward, "is_watched"):
                    self._wrap(fabric, "__init__", self._make_fabric)
                    self._wrap(fabric, "backward", self._run_backward)
        return found

    def _wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        wrapped.is_watched = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)

    def _make_trainer(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        limited = limit(kwargs, self._steps)
        self.write("trainer", type(trainer).__name__, changed=_changed(kwargs, limited))
        original(trainer, *args, **{**kwargs, **limited})
        if not kwargs.get("fast_dev_run"):
            self._limits[id(trainer)] = _Limit(kwargs, limited)

    def _make_fabric(self, original: Callable[..., None], fabric: Any, *args: Any, **kwargs: Any) -> None:
        names = ("accelerator", "strategy", "devices", "num_nodes")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.write("fabric", type(fabric).__name__)
        original(fabric, *args[len(names) :], **{**given, **_one_process(given)})

    def _run_backward(self, original: Callable[..., None], fabric: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if self._backward == self._steps:
            raise _EnoughError
        self._backward += 1
        self._clock = self._backward
        self.write("result", "Fabric.backward", value=_number(tensor))
        original(fabric, tensor, *args, **kwargs)

    def _run_verb(self, verb: str, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer is not None:
            return original(owner, *args, **kwargs)  # a search's own fit
        self._trainer = trainer = getattr(owner, "_trainer", owner)
        self._verb = verb
        self._verbs += 1
        self._clock = 0
        given = [*args, *kwargs.values()]
        module = next((one for one in given if _is_module(one)), None) or getattr(trainer, "lightning_module", None)
        if verb == "fit" and id(trainer) in self._limits:
            self._limits[id(trainer)].apply(trainer, kwargs.get("ckpt_path"))
        self.write("verb", verb, **_context(trainer, kwargs))
        if module is not None:
            self._watch_class("module", type(module))
        for one in [*given, getattr(trainer, "datamodule", None)]:
            if hasattr(one, "prepare_data") and not _is_module(one):
                self._watch_class("datamodule", type(one))
        self._watch_callbacks(trainer.callbacks)
        for number, logger in enumerate(trainer.loggers):
            self._watch_logger(number, logger)
        try:
            results = original(owner, *args, **kwargs)
            if verb in ("validate", "test") and isinstance(results, list):
                for row in results:
                    self.write("row", f"results of {verb}", **{key: _number(value) for key, value in row.items()})
            return results
        finally:
            module = module or getattr(trainer, "lightning_module", None)
            if module is not None and sys.exc_info()[0] is None:
                self._note_state(module)
                metrics = {name: _number(value) for name, value in sorted(trainer.callback_metrics.items())}
                self.write("metrics", "callback_metrics", **metrics)
                self.write("metrics", "counts", epoch=trainer.current_epoch, step=trainer.global_step)
            self._trainer = None

    # --- the program's classes -------------------------------------------------------------------------------------

    def _watch_callbacks(self, callbacks: Iterable[Any]) -> None:
        for callback in callbacks:
            self._watch_class("callback", type(callback))

    def _watch_class(self, kind: str, cls: type) -> None:
        for owner in cls.__mro__:
            if owner.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for name in HOOKS[kind]:
                method = vars(owner).get(name)
                if isinstance(method, types.FunctionType) and not hasattr(method, "is_watched"):
                    self._wrap_hook(owner, name, method)

    def _wrap_hook(self, owner: type, name: str, method: Callable[..., Any]) -> None:
        @functools.wraps(method)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            key = (id(this), name)
            if key in self._inside or self._trainer is None:
                return method(this, *args, **kwargs)  # an override calls that of its base
            self._inside.add(key)
            try:
                return self._call(name, method, this, args, kwargs)
            finally:
                self._inside.discard(key)

        wrapped.is_watched = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)

    def _call(
        self, name: str, method: Callable[..., Any], this: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        shown = f"{type(this).__name__}.{name}"
        if name in _STEPS:
            self._note_state(this)
            if name == "training_step":
                self._clock += 1
        trainer = self._trainer
        numbers = {f"argument {n}": one for n, one in enumerate(args) if type(one) is int}
        numbers.update({key: one for key, one in kwargs.items() if type(one) is int})
        self.write("hook", shown, epoch=trainer.current_epoch, step=trainer.global_step, **numbers)
        if name in _STEPS and (args or kwargs):
            batch = args[0] if args else next(iter(kwargs.values()))
            self.write("batch", f"batch of {shown}", digest=_digest(batch))
        result = method(this, *args, **kwargs)
        if name in _STEPS:
            self.write("result", f"result of {shown}", value=_number(_loss(result)))
        elif name == "configure_callbacks" and result:
            self._watch_callbacks(result if isinstance(result, list | tuple) else [result])
        return result

    def _watch_logger(self, number: int, logger: Any) -> None:
        for name in ("log_metrics", "log_hyperparams"):
            owner = next((one for one in type(logger).__mro__ if name in vars(one)), None)
            if owner is not None and not hasattr(vars(owner)[name], "is_watched"):
                self._wrap(owner, name, functools.partial(self._log, name, number))

    def _log(self, name: str, number: int, original: Callable[..., Any], logger: Any, *args: Any, **kwargs: Any) -> Any:
        key = (id(logger), "log")
        if key in self._inside:  # a logger calls itself: TensorBoardLogger does for its hyperparameters
            return original(logger, *args, **kwargs)
        self._inside.add(key)
        try:
            if name == "log_metrics":
                loggers = self._trainer.loggers if self._trainer is not None else []
                position = next((n for n, one in enumerate(loggers) if one is logger), number)
                given = {**dict(zip(("metrics", "step"), args, strict=False)), **kwargs}
                values = {key: _number(value) for key, value in given.get("metrics", {}).items()}
                self.write("row", f"row of logger {position}", **{"at step": given.get("step"), **values})
            return original(logger, *args, **kwargs)
        finally:
            self._inside.discard(key)

    # --- state -----------------------------------------------------------------------------------------------------

    def _note_state(self, module: Any) -> None:
        """Write the weights, the learning rates, and the checkpoints that were written or removed since."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.write("weights", "weights", **{name: _fingerprint(one) for name, one in tensors.items()})
        if self._verb == "fit":
            rates: dict[str, Any] = {}
            for number, optimizer in enumerate(self._trainer.optimizers):
                for index, group in enumerate(optimizer.param_groups):
                    rates[f"optimizer {number}, group {index}"] = _number(group["lr"])
            self.write("rates", "learning rates", **rates)
        self._note_checkpoints()

    def _note_checkpoints(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for folder, folders, files in os.walk(self._root):
            for name in [*files, *folders]:
                path = os.path.join(folder, name)
                if name.endswith(".ckpt") and not os.path.islink(path):
                    state = os.stat(path)
                    found[os.path.relpath(path, self._root)] = (state.st_mtime_ns, state.st_size)
            folders[:] = [name for name in folders if not name.endswith(".ckpt")]
        for path in sorted(self._files.keys() - found.keys()):
            self.write("checkpoint", path, event="removed")
        for path in sorted(found):
            if self._files.get(path) != found[path]:
                self.write("checkpoint", path, event="written", **_counts_of(self._root / path))
        self._files = found

    def note_end(self, error: BaseException | None) -> None:
        """Write how the program ended."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if error is None or isinstance(error, _EnoughError):
            self.write("end", "end", error="", frames="")
            return
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_own(frame.filename)][-6:]
        text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
        self.write("end", "end", error=type(error).__name__, frames=text)


# --- limits --------------------------------------------------------------------------------------------------------


def limit(arguments: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments of a Trainer that are changed, so that it makes this number of steps in one process.

    Args:
        arguments: What the program passes.
        steps: Training steps of a fit.
    """
    if arguments.get("fast_dev_run"):
        return _one_process(arguments)
    accumulated = arguments.get("accumulate_grad_batches") or 1
    epochs = arguments.get("max_epochs")
    # Two epochs where the program has them, so that what happens at their ends is compared, too.
    num_epochs = 1 if epochs == 1 or steps == 1 else 2
    batches = math.ceil(steps / num_epochs) * accumulated
    given = arguments.get("max_steps")
    # Lightning resumes in another way where max_steps is set: it stays unset where the program leaves it.
    is_unset = given is None or given == -1
    changed = {
        **_one_process(arguments),
        **(
            {"max_epochs": 0 if epochs == 0 else num_epochs} if is_unset else {"max_steps": min(int(given or 0), steps)}
        ),
        "limit_train_batches": _at_most(arguments.get("limit_train_batches"), batches),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": _at_most(arguments.get("num_sanity_val_steps"), 2),
        "check_val_every_n_epoch": 1,
        **{f"limit_{stage}_batches": _at_most(arguments.get(f"limit_{stage}_batches"), 2) for stage in _EVALUATIONS},
    }
    if arguments.get("check_val_every_n_epoch", 1) is None:
        changed["check_val_every_n_epoch"] = None
    interval = arguments.get("val_check_interval")
    if type(interval) is int and interval > batches:
        changed["val_check_interval"] = batches
    elif type(interval) is float and int(batches * interval) < 1:
        changed["val_check_interval"] = 1 / batches
    return changed


class _Limit:
    """The limit of a Trainer, which is raised for a fit that continues a run.

    Args:
        wanted: The arguments of the program.
        limited: What is changed.
    """

    def __init__(self, wanted: Mapping[str, Any], limited: Mapping[str, Any]) -> None:
        self._name = "max_steps" if "max_steps" in limited else "max_epochs"
        self._size = self._set = limited[self._name]
        most = wanted.get(self._name)
        self._most: float = math.inf if most is None or most == -1 else int(most)

    def apply(self, trainer: Any, path: Any) -> None:
        """Let a fit go as far beyond what is done as the first one.

        Args:
            trainer: The Trainer.
            path: The checkpoint from which it continues, if any.
        """
        loop = trainer.fit_loop
        is_in_epoch = self._name == "max_steps" and "max_steps" in vars(loop.epoch_loop)  # Lightning
        holder = loop.epoch_loop if is_in_epoch else loop
        now = getattr(holder, self._name)
        if now != self._set and now not in (None, -1):
            self._most = now  # the program changed it
        self._set = int(min(self._size + self._done(trainer, path), self._most))
        if now != self._set:
            setattr(holder, self._name, self._set)

    def _done(self, trainer: Any, path: Any) -> int:
        if path == "best":
            path = getattr(trainer.checkpoint_callback, "best_model_path", "")
        counts = _counts_of(Path(path)) if path and os.path.isfile(path) else {}
        if self._name == "max_steps":
            return int(counts.get("global_step", trainer.global_step))
        return int(counts["epoch"] + 1 if "epoch" in counts else trainer.current_epoch)


_EVALUATIONS = ("val", "test", "predict")


def _changed(given: Mapping[str, Any], limited: Mapping[str, Any]) -> list[str]:
    """Return the arguments that the program passes, and the limits change."""
    return sorted(name for name, value in limited.items() if name in given and repr(given[name]) != repr(value))


def _at_most(given: Any, most: int) -> Any:
    """Return a number of batches; a fraction may be less than that, and is known only by the loader."""
    if given == 0 or (type(given) is int and 0 < given < most):
        return given
    return most


def _one_process(arguments: Mapping[str, Any]) -> dict[str, Any]:
    strategy = arguments.get("strategy", "auto")
    is_own = not isinstance(strategy, str) and type(strategy).__module__.partition(".")[0] not in _LIBRARIES
    return {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": strategy if is_own else "auto"}


# --- values --------------------------------------------------------------------------------------------------------


def _exists(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _is_module(found: object) -> bool:
    return hasattr(found, "named_parameters") and hasattr(found, "training_step")


def _is_own(filename: str) -> bool:
    return os.path.abspath(filename) == os.path.abspath(__file__) or filename.startswith("<frozen")


def _context(trainer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rows of the documents depend on."""
    return {
        "callbacks": sorted({cls.__name__ for one in trainer.callbacks for cls in type(one).__mro__[:-1]}),
        "accumulated": int(trainer.accumulate_grad_batches),
        "is_resumed": bool(arguments.get("ckpt_path")),
        "interval": str(trainer.val_check_interval),
    }


def _loss(result: Any) -> Any:
    return result.get("loss") if isinstance(result, Mapping) else result


def _number(value: Any) -> float | str | None:
    """Return a number, with all its digits; None where there is none. JSON has no NaN, so it is a text."""
    if value is None or isinstance(value, bool | str):
        return value if value is None else str(value)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # an object, or a tensor of several numbers
        return _digest(value)
    return number if math.isfinite(number) else str(number)


def _bytes(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _fingerprint(tensor: Any) -> list[Any]:
    """Return a digest of a tensor, its norm and its first number."""
    try:
        flat = tensor.detach().cpu().double().flatten()
        norm, first = float(flat.norm()), float(flat[0]) if flat.numel() else 0.0
        shown = [value if math.isfinite(value) else str(value) for value in (norm, first)]
        return [hashlib.blake2b(_bytes(tensor), digest_size=8).hexdigest(), *shown]
    except (RuntimeError, TypeError, NotImplementedError):  # not materialized, sparse, or of another kind
        return [f"{type(tensor).__name__} of shape {list(tensor.shape)}", None, None]


def _digest(value: Any) -> str:
    """Return a text that two equal collections of tensors and plain values share."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        try:
            digest.update(_bytes(value))
        except (RuntimeError, TypeError, NotImplementedError):  # as above
            return
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(digest, one)
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
        _feed(digest, {key: one for key, one in sorted(getattr(value, "__dict__", {}).items()) if _is_data(one)})


def _is_data(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor | str | int | float)


def _counts_of(path: Path) -> dict[str, Any]:
    import torch

    if path.is_dir():
        return {}
    try:
        content = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever reading raises: a file of the program's own format
        return {"unread": type(error).__name__}
    if not isinstance(content, Mapping):
        return {}
    return {key: content[key] for key in ("epoch", "global_step") if isinstance(content.get(key), int)}


# --- the program ---------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run a program, and return its exit code.

    Args:
        arguments: The file for the record, the number of steps, and the program with its arguments.
    """
    path, steps, *command = arguments
    recorder = Recorder(os.path.abspath(path), int(steps))
    packages = recorder.watch_library()
    if not packages:
        recorder.write("absent", "lightning")
        return 2
    import torch

    version = importlib.import_module(packages[0]).__version__
    recorder.write("library", packages[0], version=str(version), torch=torch.__version__)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    error: BaseException | None = None
    try:
        _run(command)
    except BaseException as raised:  # the program's, whatever it is: it is written down
        error = raised
    recorder.note_end(error)
    return 0 if error is None or isinstance(error, SystemExit | _EnoughError) else 1


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    main_module = types.ModuleType("__main__")
    main_module.__file__ = command[0]
    # Children that are spawned, and pickles, look for the program's classes there.
    sys.modules["__main__"] = main_module
    with open(command[0], "rb") as file:
        code = compile(file.read(), command[0], "exec")
    exec(code, main_module.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
