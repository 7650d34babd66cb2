"""`Accelerator`: prepares a program's objects, on `lw.Fabric`."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ...errors import ConfigError, nearest
from ...fabric import is_wrapped
from ...precision import MixedPrecision
from ...strategies import SingleDeviceStrategy, Strategy
from . import operations, saved_states, trackers
from .configuration import DataLoaderConfiguration, GradientAccumulationPlugin, ProfileKwargs, ProjectConfiguration
from .finder import refuse
from .loaders import DataLoaderShard, prepare_data_loader, skip_first_batches
from .names import REFUSED_ARGUMENTS, REFUSED_ATTRIBUTES
from .optimizers import AcceleratedOptimizer, AcceleratedScheduler
from .processes import release_memory
from .state import AcceleratorState, GradientState, PartialState, connect

# Any in this file: objects of the program's classes, which keep them.

_PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_NAMES = {precision: name for name, precision in _PRECISIONS.items()}


class Accelerator:
    """Prepares models, optimizers, loaders and schedules for the processes and the precision.

    Args:
        device_placement: Whether models and batches are moved to the device.
        split_batches: Without effect, as in Accelerate 1.15; that of `DataLoaderConfiguration` has one.
        mixed_precision: "no", "bf16" or "fp16" (without effect on the CPU, as in Accelerate); None is
            ACCELERATE_MIXED_PRECISION of the environment, else "no".
        gradient_accumulation_steps: Number of micro-batches in an optimizer step.
        cpu: Whether to use the CPU where the machine has an accelerator.
        dataloader_config: How batches are made of samples.
        rng_types: Generators that are synchronized when a pass over a loader begins.
        log_with: Names of trackers, or trackers.
        project_dir: Folder of saved states and logs.
        project_config: Folders and names of saved states.
        gradient_accumulation_plugin: How gradients accumulate.
        step_scheduler_with_optimizer: Whether schedules step only with their optimizers.
        kwargs_handlers: Objects with arguments of DDP, the loss scale, autocast and process group.
        refused: Arguments that are not supported.

    Raises:
        ConfigError: An argument is invalid or not supported.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: object = None,
        *,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        **refused: object,
    ) -> None:
        refused |= {"deepspeed_plugin": deepspeed_plugin, "fsdp_plugin": fsdp_plugin}
        _check(refused, gradient_accumulation_steps, gradient_accumulation_plugin)
        self.project_configuration = project_config or ProjectConfiguration(project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        handlers = {type(one).__name__: one for one in kwargs_handlers or ()}
        self.handlers = handlers
        self._set_state(mixed_precision, cpu)
        if gradient_accumulation_plugin is None:
            steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or gradient_accumulation_steps)
            gradient_accumulation_plugin = GradientAccumulationPlugin(num_steps=steps)
        self.gradient_state = GradientState(gradient_accumulation_plugin)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches and not self.dataloader_config.split_batches:
            warnings.warn(
                "Accelerator(split_batches=True) has no effect in Accelerate 1.15, and so none here: pass "
                "dataloader_config=DataLoaderConfiguration(split_batches=True).",
                stacklevel=2,
            )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = rng_types or ["generator"]
        self.log_with = trackers.find_trackers(log_with, self.logging_dir)
        self.trackers: list[Any] = []
        self.step = 0
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.dataloaders: list[Any] = []
        self.custom: list[Any] = []
        self._save_hooks: dict[int, Any] = OrderedDict()
        self._load_hooks: dict[int, Any] = OrderedDict()
        self._flag: Tensor | None = None

    def _set_state(self, mixed_precision: Any, cpu: bool) -> None:
        """Connect the processes, with the precision and the strategy."""
        wanted = os.environ.get("ACCELERATE_MIXED_PRECISION") if mixed_precision is None else str(mixed_precision)
        if wanted == "fp8":
            refuse("mixed_precision='fp8'", "use mixed_precision='bf16'")
        if wanted is not None and wanted not in _PRECISIONS:
            raise ValueError(f"Unknown mixed_precision mode: {wanted}{nearest(wanted, _PRECISIONS)}.")
        shared = PartialState._shared_state
        if "mixed_precision" in shared and wanted not in (None, shared["mixed_precision"]):
            raise ValueError(
                f"Expected mixed_precision={shared['mixed_precision']!r}, as in the first Accelerator of this process, "
                f"got {wanted!r}."
            )
        wanted = wanted or shared.get("mixed_precision")
        device = "cpu" if cpu else PartialState().device.type
        # Accelerate has no loss scale on the CPU, and computes in float32.
        is_scaled = wanted == "fp16" and device != "cpu"
        plugins = []
        if is_scaled and "GradScalerKwargs" in self.handlers:
            scaler = torch.amp.GradScaler(device, **self.handlers["GradScalerKwargs"].to_kwargs())
            plugins.append(MixedPrecision("16-mixed", device, scaler))
        name = "32-true" if wanted == "fp16" and not is_scaled else _PRECISIONS.get(wanted or "")
        self.fabric = connect(
            cpu=cpu,
            precision=None if plugins else name,
            strategy=self._strategy(),
            plugins=plugins or None,
        )
        precision = self.fabric.precision
        autocast = self.handlers.get("AutocastKwargs")
        if autocast is not None and isinstance(precision, MixedPrecision) and autocast.cache_enabled is not None:
            precision.caches_weights = autocast.cache_enabled
        PartialState(cpu).adopt(self.fabric)
        shared["mixed_precision"] = wanted or _NAMES.get(precision.precision, "no")
        self.state = AcceleratorState()

    def _strategy(self) -> Strategy | str:
        world_size = int(os.environ.get("WORLD_SIZE") or 1)
        if world_size == 1:
            return "auto"
        options = {}
        if "InitProcessGroupKwargs" in self.handlers and self.handlers["InitProcessGroupKwargs"].timeout is not None:
            options["timeout"] = self.handlers["InitProcessGroupKwargs"].timeout
        if "DistributedDataParallelKwargs" in self.handlers:
            options |= _ddp_arguments(self.handlers["DistributedDataParallelKwargs"].to_kwargs())
        if not options:
            return "auto"
        from ...strategies import DDPStrategy

        return DDPStrategy(**options)

    # -- who and where -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return what the state and the configurations have: `device`, `is_main_process`, `print`, ..."""
        if name == "scaler":
            return getattr(self.fabric.precision, "scaler", None)
        if name in ("_models", "_optimizers", "_schedulers", "_dataloaders"):  # programs use them, although private
            return getattr(self, name[1:])
        if name in REFUSED_ATTRIBUTES:
            refuse(f"Accelerator.{name}", REFUSED_ATTRIBUTES[name])
        for owner in ("state", "dataloader_config", "project_configuration"):
            if hasattr(self.__dict__.get(owner), name):
                return getattr(self.__dict__[owner], name)
        raise AttributeError(f"Accelerator has no attribute {name!r}{nearest(name, dir(self))}")

    # -- objects -------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return models, optimizers, loaders and schedules, prepared, in any order; other objects unchanged.

        Args:
            args: The objects.
            device_placement: For each, whether it is moved to the device.
        """
        places: list[Any] = [None] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise ValueError(f"Expected {len(args)} values for device_placement, got {len(places)}.")
        ready = list(args)
        # Sharding replaces parameters: models come first. Schedules look for their prepared optimizers.
        for kind, prepare in (
            (nn.Module, self.prepare_model),
            (DataLoader, self.prepare_data_loader),
            (Optimizer, self.prepare_optimizer),
            (LRScheduler, lambda one, _: self.prepare_scheduler(one)),
        ):
            pairs = zip(ready, places, strict=True)
            ready = [prepare(one, place) if isinstance(one, kind) else one for one, place in pairs]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return a model that runs in the precision and, unless it is for evaluation, under the strategy."""
        moves = self.device_placement if device_placement is None else device_placement
        is_float32 = self.fabric.precision.precision == "32-true"
        if is_float32 and isinstance(self.fabric.strategy, SingleDeviceStrategy):
            # Nothing to add: the program keeps its object, as with Accelerate.
            model = self.fabric.to_device(model) if moves else model
        elif not is_wrapped(model):
            is_trained = any(parameter.requires_grad for parameter in model.parameters())
            if evaluation_mode or not is_trained:
                model = self.fabric.wrap_module(self.fabric.to_device(model) if moves else model, model)
            else:
                model = self.fabric.setup(model, move_to_device=moves)
                self._share_buffers(model)
                if self.num_processes > 1:  # as DistributedDataParallel has it
                    vars(model)["no_sync"] = partial(self.no_sync, model)
        _add(self.models, model)
        return model

    def _share_buffers(self, model: Any) -> None:
        """Let evaluation begin with rank 0's buffers, as torch's DDP does; Fabric shares them in training only."""
        handler = self.handlers.get("DistributedDataParallelKwargs")
        if self.num_processes == 1 or (handler and not handler.broadcast_buffers) or not list(model.module.buffers()):
            return
        is_due = True

        def share(*_: object) -> None:
            nonlocal is_due
            if torch.is_grad_enabled():
                is_due = self.sync_gradients or self.gradient_state.plugin.sync_each_batch
            elif is_due:
                operations.broadcast(list(model.module.buffers()))
                is_due = False

        model.register_forward_pre_hook(share)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of this process's batches."""
        if not isinstance(data_loader, DataLoaderShard):
            moves = self.device_placement if device_placement is None else device_placement
            data_loader = prepare_data_loader(
                data_loader, self.device, put_on_device=moves, rng_types=self.rng_types,
                slice_fn_for_dispatch=slice_fn_for_dispatch, **vars(self.dataloader_config),
            )  # fmt: skip
        _add(self.dataloaders, data_loader)
        return data_loader

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return an optimizer that steps when gradients are synchronized."""
        is_ready = isinstance(optimizer, AcceleratedOptimizer)
        ready: AcceleratedOptimizer = optimizer if is_ready else AcceleratedOptimizer(optimizer, self.fabric)
        _add(self.optimizers, ready)
        return ready

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a schedule that steps with its optimizer."""
        if not isinstance(scheduler, AcceleratedScheduler):
            own = [one for one in self.optimizers if one.optimizer is getattr(scheduler, "optimizer", None)]
            scheduler = AcceleratedScheduler(
                scheduler, own or self.optimizers, self.step_scheduler_with_optimizer, self.split_batches
            )
        _add(self.schedulers, scheduler)
        return scheduler

    unwrap_model = staticmethod(operations.extract_model_from_parallel)
    skip_first_batches = staticmethod(skip_first_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared; returns None for each object."""
        for known in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            known.clear()
        self.step = 0
        return release_memory(*objects)

    clear = free_memory

    # -- the step ------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window."""
        return bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches by which losses are divided."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin.num_steps = value

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch; the loader's last one ends a window, whose losses are divided by the full number."""
        state = self.gradient_state
        if state.plugin.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        with ExitStack() as stack:
            for model in models if not (state.sync_gradients or state.plugin.sync_each_batch) else ():
                stack.enter_context(self.no_sync(model))
            yield

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients over processes."""
        return self.fabric.no_backward_sync(model) if is_wrapped(model) else nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss, divided by the number of micro-batches in a window."""
        self.fabric.backward(loss / self.gradient_accumulation_steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale; of all optimizers by default."""
        chosen = (
            self.optimizers if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        )
        for one in chosen:
            self.fabric.unscale_gradients(one.inner if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip the total norm of gradients, and return it as it was."""
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether gradients overflowed, and an optimizer skipped its last step."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[object]:
        """Return the context of forward passes."""
        handler = autocast_handler or self.handlers.get("AutocastKwargs")
        if handler is not None and not handler.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return self.fabric.autocast()

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """Run the block under torch's profiler, with the settings of `ProfileKwargs`, and yield the profiler."""
        options = (profile_handler or self.handlers.get("ProfileKwargs") or ProfileKwargs()).to_dict()
        folder, schedule = options.pop("output_trace_dir"), options.pop("schedule_option")
        kinds = [getattr(torch.profiler.ProfilerActivity, str(kind).upper()) for kind in options["activities"] or ()]
        options |= {"activities": kinds or None, "schedule": schedule and torch.profiler.schedule(**schedule)}
        with torch.profiler.profile(**options) as profiler:
            yield profiler
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(folder, f"profile_{self.process_index}.json"))
            self.fabric.barrier()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Run the block; Accelerate does no more on the CPU or in one process, and elsewhere this is refused."""
        if self.num_processes > 1 and self.device.type != "cpu":
            refuse("Accelerator.join_uneven_inputs", "use lw.Fabric().setup_dataloaders(loader, uneven='stop_all')")
        warnings.warn("join_uneven_inputs has an effect on several GPUs only.", stacklevel=3)
        yield

    # -- collectives ---------------------------------------------------------------------------------------------

    gather = staticmethod(operations.gather)
    pad_across_processes = staticmethod(operations.pad_across_processes)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data of all processes; after the last batch without the samples that completed it.

        Args:
            input_data: A structure of tensors, or a list of objects.
            use_gather_object: Whether it is a list of objects, although it holds tensors.
        """
        is_object = use_gather_object or not operations.are_tensors(input_data)
        data = operations.gather_object(input_data) if is_object else operations.gather(input_data)
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return data
        return data[:remainder] if is_object else operations.slice_tensors(data, slice(remainder))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or maximum over processes."""
        return operations.reduce(tensor, reduction, scale)

    def set_trigger(self) -> None:
        """Let `check_trigger` be true on all processes."""
        self._flag = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether a process has called `set_trigger` since the last time it had. Called on all."""
        flag = torch.tensor(0, device=self.device) if self._flag is None else self._flag
        is_set = bool(self.reduce(flag).item() >= 1)
        self._flag = None if is_set else self._flag
        return is_set

    # -- trackers ------------------------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: Name of the project.
            config: Hyperparameters.
            init_kwargs: Name of a tracker -> its arguments.
        """
        self.trackers += trackers.make_trackers(self.log_with, project_name, self.logging_dir, init_kwargs or {})
        for tracker in self.trackers if config is not None else ():
            tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or what its library has for the run."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            raise ValueError(f"{name} is not an available tracker: {[one.name for one in self.trackers]}.")
        return trackers.GeneralTracker(_blank=True)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values to all trackers.

        Args:
            values: Name -> value.
            step: The step.
            log_kwargs: Name of a tracker -> arguments.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """End the trackers, and disconnect the processes."""
        for tracker in self.trackers:
            tracker.finish()
        self.fabric.teardown()

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on rank 0."""
        saved_states.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the model's complete state, with the names of the user's model. Called on all processes."""
        return self.unwrap_model(model).state_dict()

    def save_model(
        self, model: Any, save_directory: str | os.PathLike[str], max_shard_size: Any = "10GB",
        safe_serialization: bool = True,
    ) -> None:  # fmt: skip
        """Write the model's weights to a folder, as one file, or several with an index if it is larger than a limit."""
        from huggingface_hub import save_torch_state_dict

        state = self.get_state_dict(model)
        each = self.project_configuration.save_on_each_node
        if self.is_local_main_process if each else self.is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            save_torch_state_dict(
                state, Path(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save further objects with `state_dict` and `load_state_dict` in `save_state`."""
        wrong = [one for one in objects if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))]
        if wrong:
            raise ValueError(f"Expected objects with state_dict and load_state_dict, got {wrong!r}.")
        self.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before `save_state` writes; it may take weights out of the list."""
        return _registered(hook, self._save_hooks)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before `load_state` reads; it may take models out of the list."""
        return _registered(hook, self._load_hooks)

    @property
    def save_iteration(self) -> int:
        """Number of the next folder with automatic names."""
        return int(self.project_configuration.iteration)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> Path:
        """Write the state of everything that was prepared or registered. Called on all processes.

        Args:
            output_dir: The folder; None with automatic names.
            safe_serialization: Whether weights are written as safetensors.
            kwargs: Accepted for compatibility.
        """
        folder = saved_states.next_folder(self, output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        weights = [self.get_state_dict(model) for model in self.models]
        for hook in self._save_hooks.values():
            hook(self.models, weights, str(folder))
        saved_states.write_state(self, folder, weights=weights, is_safe=safe_serialization)
        self.project_configuration.iteration += 1
        return folder

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: object = None, **kwargs: Any
    ) -> None:
        """Load a folder of `save_state`, of this layer or of Accelerate itself. Called on all processes.

        Args:
            input_dir: The folder; None for the last one of automatic names.
            load_kwargs: Accepted for compatibility.
            kwargs: Arguments of `load_state_dict` of modules.
        """
        folder = saved_states.last_folder(self, input_dir)
        kwargs.pop("map_location", None)
        models = list(self.models)
        for hook in self._load_hooks.values():
            hook(models, str(folder))
        saved_states.read_state(self, folder, models, kwargs)


def _check(refused: dict[str, object], steps: int, plugin: Any) -> None:
    for name, value in refused.items():
        if name not in REFUSED_ARGUMENTS:
            raise TypeError(f"Accelerator has no argument {name!r}{nearest(name, REFUSED_ARGUMENTS)}.")
        if value not in (None, "no"):
            refuse(f"Accelerator({name}=...)", REFUSED_ARGUMENTS[name])
    for name, instead in REFUSED_ARGUMENTS.items():  # `accelerate launch` sets ACCELERATE_USE_FSDP, ..._DEEPSPEED
        variable = f"ACCELERATE_USE_{name.removesuffix('_plugin').upper()}"
        if os.environ.get(variable, "").lower() == "true":
            refuse(f"{variable}=true", instead)
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() not in ("", "no"):
        refuse(f"ACCELERATE_DYNAMO_BACKEND={backend}", REFUSED_ARGUMENTS["dynamo_backend"])
    if plugin is not None and steps != 1:
        raise ConfigError(
            "Expected either gradient_accumulation_steps or gradient_accumulation_plugin, got both.",
            fix="pass GradientAccumulationPlugin(num_steps=...) only.",
        )


def _ddp_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of DDPStrategy for fields of `DistributedDataParallelKwargs`; a wrapper alone does nothing."""
    names = {"comm_hook": "ddp_comm_hook", "comm_wrapper": "ddp_comm_wrapper", "comm_state_option": "ddp_comm_state"}
    chosen = {names[name]: settings.pop(name) for name in list(settings) if name in names}
    kind = str(chosen.get("ddp_comm_hook", "no"))
    if kind == "batched_power_sgd":
        refuse("comm_hook='batched_power_sgd'", "use comm_hook='power_sgd'")
    if kind != "power_sgd":
        chosen.pop("ddp_comm_state", None)
    return settings | (chosen if kind != "no" else {})


def _registered(hook: Callable[..., None], hooks: dict[int, Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _add(known: list[Any], one: Any) -> None:
    if not any(other is one for other in known):
        known.append(one)
