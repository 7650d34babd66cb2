"""The base of XLA strategies: one process whose tensors are computed lazily, as one graph per step.

Operations on an XLA device only record a graph; `mark_step` compiles it, once for each form, and executes it. The host
never waits for it, and no tensor is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...accelerators.xla import import_xla, is_runtime_started
from ...errors import ConfigError, LaunchError, ModuleError
from ...protocols import Batch, CheckpointPlugin, Closure, Cluster, StateDict, StepOutput, T, Tree
from ..base import Strategy
from ..parallel import ParallelStrategy
from ..skip_init import SkipInit
from ..traits import Traits
from ..tree import leaves, map_leaves
from .sharding import BatchSharding, Spec, copy_shards, replicated, send_state, send_tensors
from .slowdowns import StepWatch

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision

Step = Callable[..., StepOutput]
_DEBUG = ("PT_XLA_DEBUG", "XLA_IR_DEBUG", "XLA_HLO_DEBUG")
EVALUATIONS = ("validation_step", "test_step", "predict_step")


def of_xla(traits: Traits) -> Traits:
    """Return the traits of a strategy whose tensors are computed by XLA."""
    refusal = ("XLA's graphs sum gradients by themselves", "leave it out, or pass precision='bf16-mixed'")
    return replace(traits, accelerator_kind="xla", traces_lazily=True, accumulation_refusal=refusal)


class XLAProcessStrategy(ParallelStrategy):
    """One process that computes by XLA: on one device, or, with a `data_axis`, on all devices of this host.

    A graph ends in three places only: after an optimizer step (in manual optimization after the training step, so that
    several optimizers share a graph), before a further micro-batch of one optimizer step, and after a step without
    gradients.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        debug: Whether torch_xla reports what it compiles and why, with the lines of the program (PT_XLA_DEBUG,
            XLA_IR_DEBUG, XLA_HLO_DEBUG). Best set before the first import of torch_xla.
        precision: Another name for `precision_plugin`.
        cluster_environment: None where one process has all devices.
        options: Further arguments of ParallelStrategy.

    Raises:
        ConfigError: `cluster_environment` was given, but one process has all devices.
    """

    traits = of_xla(Strategy.traits)
    start_method: str | None = None
    exchanges_in_backward: bool = False
    """Whether a backward pass executes graphs, to average gradients over ranks."""
    data_axis: str | None = None
    """Name of the mesh axis that batches are sharded over; None: this process has one device."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        *,
        debug: bool = False,
        precision: Precision | None = None,
        cluster_environment: Cluster | None = None,
        **options: Any,  # Any: see above
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            precision=precision,
            **options,
        )
        if self.data_axis is not None and cluster_environment is not None:
            raise ConfigError(
                f"Expected cluster_environment=None for {type(self).__name__}, which uses one process for all devices "
                f"of a host, got {cluster_environment!r}.",
                fix="remove cluster_environment=.",
            )
        if "start_method" not in options:
            self.start_method = None
        self.debug = debug
        self._lw_sync: Callable[..., None] | None = None
        # Gradients of a micro-batch are in the graph, without an optimizer step.
        self._lw_has_gradients = False
        # A training step in manual optimization is running: the graph ends with it.
        self._lw_is_in_manual_step = False
        # Graphs that mark_step has executed.
        self._lw_num_graphs = 0
        self._lw_variables: dict[str, str | None] = {}
        self._lw_mesh: Any = None
        self._lw_batch_sharding: BatchSharding | None = None

    # -- devices -------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """The devices that this process computes on, which a batch is sharded over."""
        return [self.device] if self.data_axis is None else list(self.parallel_devices or [self.device])

    @property
    def num_devices(self) -> int:
        """Number of XLA devices that this process computes on."""
        return len(self.devices)

    @property
    def device(self) -> torch.device:
        """The device of tensors; a virtual device that represents all devices if there are several."""
        return super().device if self.data_axis is None else torch.device("xla", 0)

    @device.setter
    def device(self, device: torch.device) -> None:
        if self.data_axis is not None:
            raise ConfigError(
                f"{type(self).__name__} uses all devices, so its device cannot be set to {device}.",
                fix="use SingleDeviceXLAStrategy(device).",
            )
        self._lw_device = device

    @property
    def mesh(self) -> Any:
        """torch_xla's Mesh of the devices, with one axis, `data_axis`."""
        if self._lw_mesh is None:
            spmd = import_xla("torch_xla.distributed.spmd")
            self._lw_mesh = spmd.Mesh(list(range(self.num_devices)), (self.num_devices,), (self.data_axis,))
            spmd.set_global_mesh(self._lw_mesh)
        return self._lw_mesh

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Start XLA's runtime. Called once."""
        if self.debug:
            self._lw_put(dict.fromkeys(_DEBUG, "1"))
        self.start_runtime()
        super().setup_environment()
        self._lw_seed()

    def start_runtime(self) -> None:
        """Start the runtime with the devices that this strategy needs, unless it is started.

        Raises:
            ConfigError: torch_xla is missing, or the started runtime has too few devices.
        """
        if not is_runtime_started() and os.environ.get("PJRT_DEVICE", "").upper() == "CPU":
            # The number of a CPU's devices is set before the runtime starts; never fewer than were requested.
            wanted = max(self.num_devices, self._lw_last_index() + 1, int(os.environ.get("CPU_NUM_DEVICES") or 1))
            os.environ["CPU_NUM_DEVICES"] = str(wanted)
        xla = import_xla(needed_for=type(self).__name__)
        if self.num_devices > 1:
            self._lw_switch_spmd_on()
        count = int(import_xla("torch_xla.runtime").global_runtime_device_count())
        if count <= self._lw_last_index():
            raise ConfigError(
                f"Expected {self._lw_last_index() + 1} devices for {type(self).__name__}, got {count} from XLA's "
                "runtime, which cannot change in this process.",
                fix=f"pass devices={count}, or start with CPU_NUM_DEVICES={self._lw_last_index() + 1} (on a CPU).",
            )
        self._lw_check_autograd()
        self._lw_sync = xla.sync

    def _lw_check_autograd(self) -> None:
        """Refuse a process whose first backward pass ran before the runtime was started.

        Autograd makes its threads then, one for each device, and never again.

        Raises:
            LaunchError: The backward pass was too early.
        """
        with torch.enable_grad():
            value = torch.zeros((), device=self.device, requires_grad=True)
            try:
                value.clone().backward()
            except RuntimeError as error:
                if "device_ready_queues_" not in str(error):
                    raise
                raise LaunchError(
                    "Expected XLA's runtime to be started before the first backward pass of this process, got a "
                    "backward pass on another device first. torch's backward pass does not use devices added later.",
                    fix="train with XLA in a separate process, or begin the program with "
                    "`import torch_xla; torch_xla.device()` (for several devices, train on XLA first).",
                ) from error

    def _lw_switch_spmd_on(self) -> None:
        """Let one process use all devices, until it ends.

        Raises:
            ConfigError: The runtime has another number of devices.
        """
        runtime = import_xla("torch_xla.runtime")
        if is_runtime_started():
            self._lw_check_count()  # before SPMD is switched on
        if not runtime.is_spmd():
            runtime.use_spmd()
        self._lw_check_count()

    def _lw_check_count(self) -> None:
        count = int(import_xla("torch_xla.runtime").global_runtime_device_count())
        if count != self.num_devices:
            raise ConfigError(
                f"Expected {count} devices, all of XLA's runtime in this process, for {type(self).__name__}, got "
                f"{self.num_devices}.",
                fix=f"pass devices={count}; on a CPU CPU_NUM_DEVICES sets the number, before the runtime starts.",
            )

    def _lw_last_index(self) -> int:
        return max(self.device.index or 0, self.num_devices - 1)

    def _lw_seed(self) -> None:
        """Seed XLA's generator from torch's: the same seed draws the same dropout."""
        import_xla("torch_xla.core.xla_model").set_rng_state(torch.initial_seed() % 2**63)

    def _lw_put(self, variables: dict[str, str]) -> None:
        for name, value in variables.items():
            self._lw_variables.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def teardown(self) -> None:
        """Wait for the device, and restore environment variables of `debug`. The runtime stays."""
        if self._lw_sync is not None:
            import_xla("torch_xla.core.xla_model").wait_device_ops()
        for name, before in self._lw_variables.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._lw_variables = {}
        super().teardown()

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "_lw_sync": None}

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a module is built on the CPU, and moved later.

        Its initial values then equal any other strategy's with this seed, and no graph is compiled for them.

        Args:
            empty_init: True leaves parameters without values, for a checkpoint that is loaded next.
        """
        with SkipInit() if empty_init else nullcontext():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move parameters, gradients and buffers in place: the same objects, so that ties and optimizers stay valid.

        Raises:
            ModuleError: Another object refers to a parameter, so that it cannot be moved in place; names it.
        """
        device = self.device
        moved: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters():
            if parameter.device == device:
                continue
            gradient = parameter.grad
            parameter.grad = None
            # `module.to` would make new parameters, since a CPU tensor cannot become an XLA one: ties would be lost.
            copied = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            try:
                torch.utils.swap_tensors(parameter, copied)
            except RuntimeError as error:
                raise ModuleError(
                    f"The parameter {name} of {type(module).__name__} cannot be moved to {device}: {error}",
                    fix="build a new module for this run, and keep no graph or weak reference of its parameters.",
                ) from error
            if gradient is not None:
                parameter.grad = gradient.to(device)
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.device != device:
                    child._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module, on its device, not wrapped."""
        self.module_to_device(module)
        self.place_parameters(module)
        return module

    def place_parameters(self, module: nn.Module) -> None:
        """Set the sharding of the module's tensors, on the device already, over several devices."""
        if self.num_devices > 1:
            for parameter in module.parameters():
                self.mark(parameter, self.spec_of(parameter))
            for buffer in module.buffers():
                self.mark(buffer, replicated(buffer))

    def spec_of(self, parameter: Tensor) -> Spec:
        """Return the mesh's axis for each dimension of a parameter; None for a dimension that is not sharded."""
        return replicated(parameter)

    def mark(self, tensor: Tensor, spec: Spec) -> None:
        """Set the sharding of a tensor, unless it has one."""
        lib = import_xla()._XLAC
        if not lib._get_xla_sharding_spec(tensor):
            # torch_xla's mark_sharding, without the object that it returns.
            lib._xla_mark_sharding(tensor, self.mesh.get_op_sharding(spec))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, with its existing state on its parameters' device."""
        device = self.device
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                # Counters of steps stay on the host, where the optimizer reads them.
                if isinstance(value, Tensor) and value.ndim and value.device != parameter.device:
                    state[name] = value.to(device)
        return optimizer

    def process_dataloader(self, loader: Iterable[Batch], **options: object) -> Iterable[Batch]:
        """Return torch_xla's loader for a handwritten loop: a thread moves batches ahead of the loop.

        The Trainer and `Fabric.setup_dataloaders` move batches without it: batches that a thread has read ahead would
        be missing in a checkpoint. This loader does not end graphs; the optimizer step does.

        Args:
            loader: An iterable of batches on the host.
            options: Further arguments of torch_xla's MpDeviceLoader.
        """
        parallel_loader = import_xla("torch_xla.distributed.parallel_loader")
        options = {"batches_per_execution": 2**62, "input_sharding": self.input_sharding(), **options}
        found: Iterable[Batch] = parallel_loader.MpDeviceLoader(loader, self.device, **options)
        return found

    def input_sharding(self) -> BatchSharding | None:
        """Return the sharding of batches over several devices, along their first dimension; None for one."""
        if self.num_devices == 1:
            return None
        if self._lw_batch_sharding is None:
            self._lw_batch_sharding = BatchSharding(self.mesh, self.data_axis, self.num_devices)
        return self._lw_batch_sharding

    def place_batch(self, batch: Batch) -> Batch:
        """Return a batch whose host tensors were sent to the devices, a shard to each, without waiting.

        Called by Fabric before it moves the rest.
        """
        sharding = self.input_sharding()
        found = {id(leaf): leaf for _, leaf in leaves(batch) if type(leaf) is Tensor and leaf.device.type == "cpu"}
        if sharding is None or not found:
            return batch
        sent = send_tensors([*found.values()], [sharding.xla_spec(one) for one in found.values()], self.device)
        on_device = dict(zip(found, sent, strict=True))
        return map_leaves(batch, lambda leaf: on_device.get(id(leaf), leaf))

    # -- steps ---------------------------------------------------------------------------------------------------

    def mark_step(self) -> None:
        """Execute the graph recorded since the last call; the host does not wait. Seeds call it this, too."""
        self._lw_has_gradients = False
        self._lw_num_graphs += 1
        if self._lw_sync is None:
            self._lw_sync = import_xla().sync
        # The names that a profiler gives to operations may be open here.
        self._lw_sync(reset_scope=False)

    def bind_step(self, module: nn.Module, name: str) -> Step:
        """Return a function that runs `module.<name>`, and ends the graph with the step."""
        step = super().bind_step(module, name)
        if name in EVALUATIONS:
            return self._lw_end_graph_after(step)
        is_manual = name == "training_step" and not getattr(self.unwrap(module), "automatic_optimization", True)
        # A compiled submodule executes a separate graph each time.
        is_compiled = any(hasattr(part, "dynamo_ctx") for part in module.modules())
        finds_reads = not is_compiled and not (is_manual and self.exchanges_in_backward)
        watched = StepWatch(name, step, own_graphs=lambda: self._lw_num_graphs, finds_reads=finds_reads)
        return self._lw_manual(watched) if is_manual else self._lw_split_by_micro_batch(watched)

    def _lw_end_graph_after(self, step: Step) -> Step:
        def run(*args: object, **kwargs: object) -> StepOutput:
            output = step(*args, **kwargs)
            self.mark_step()
            return output

        return run

    def _lw_split_by_micro_batch(self, watch: StepWatch) -> Step:
        def run(*args: object, **kwargs: object) -> StepOutput:
            # Else the graph and its memory would grow with the number of micro-batches.
            if self._lw_has_gradients:
                self.mark_step()
            output = watch.run(*args, **kwargs)
            if not torch.is_grad_enabled():
                self.mark_step()
            return output

        return run

    def _lw_manual(self, watch: StepWatch) -> Step:
        def run(*args: object, **kwargs: object) -> StepOutput:
            self._lw_is_in_manual_step = True
            try:
                output = watch.run(*args, **kwargs)
            finally:
                self._lw_is_in_manual_step = False
            self.mark_step()
            return output

        return run

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:  # Any: arguments of Tensor.backward
        """Compute gradients of a loss (shape (), already scaled by the precision)."""
        tensor.backward(*args, **kwargs)
        self._lw_has_gradients = True

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the optimizer and execute the step's graph."""
        super().optimizer_step(optimizer, closure)
        if not self._lw_is_in_manual_step:
            self.mark_step()
        return True

    # -- state ---------------------------------------------------------------------------------------------------

    def gather_state(self, state: T) -> T:
        """Return a state with full tensors on the host, in one transfer: any strategy can load it."""
        found = {id(leaf): leaf for _, leaf in leaves(state) if _is_on_xla(leaf)}
        if not found:
            return state
        # Without mark_step, which would advance XLA's random generator: a run that saves must draw as one that resumes.
        copies = dict(zip(found, self.copy_to_host([tensor.detach() for tensor in found.values()]), strict=True))
        full: T = map_leaves(state, lambda leaf: copies.get(id(leaf), leaf))
        return full

    def copy_to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return full tensors on the host, in one transfer and their shards one by one; waits for the device."""
        copies = {} if self.data_axis is None else copy_shards(tensors)
        rest = [tensor for tensor in tensors if id(tensor) not in copies]
        copies.update(zip(map(id, rest), import_xla()._XLAC._xla_get_cpu_tensors(rest), strict=True))
        return [copies[id(tensor)] for tensor in tensors]

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state of host tensors; see `Strategy`. Each device gets its shard of a parameter only."""
        if self.num_devices > 1:
            state = send_state(self.unwrap(module), state, self.spec_of, self.mesh, self.device)
        result = super().load_module_state_dict(module, state, strict)
        self.place_parameters(self.unwrap(module))
        self.mark_step()
        return result

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state of host tensors; see `Strategy`."""
        super().load_optimizer_state(optimizer, state, module)
        self.place_optimizer(optimizer)
        self.mark_step()

    def place_optimizer(self, optimizer: Optimizer) -> None:
        """Set the sharding of the optimizer's loaded state over several devices: that of its parameters."""
        if self.num_devices == 1:
            return
        for parameter, state in optimizer.state.items():
            for value in state.values():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_like and value.device == parameter.device:
                    self.mark(value, self.spec_of(parameter))

    def __repr__(self) -> str:
        return super().__repr__() if self.data_axis is None else f"{type(self).__name__}(devices={self.num_devices})"


def _is_on_xla(leaf: Tree) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "xla"
