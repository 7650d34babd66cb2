"""Fine-tuning: callbacks that train a part of the module first and unfreeze more of it later.

A frozen parameter that is unfrozen gets its own parameter group. A resumed run restores the groups before the
optimizer's state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import CheckpointError, ConfigError
from ..messages import warn
from ..protocols import ParamGroup
from .base import AnyModule, Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..protocols import StateDict
    from ..trainer import Trainer

_log = logging.getLogger(__name__)

Modules = nn.Module | Iterable[Any]  # Any: modules, and iterables of them to any depth


def multiplicative(epoch: int) -> float:
    """Return 2, the default factor by which `BackboneFinetuning` multiplies the backbone's rate at each epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Freeze parts of the module before training and unfreeze them later: the base of such callbacks.

    Subclasses define `freeze_before_training` and `finetune_function`. Parameters that are frozen when optimizers are
    built are best left out of them (`filter(lambda p: p.requires_grad, self.parameters())`); `finetune_function` adds
    them with `unfreeze_and_add_param_group`.

    ```python
    class HeadFirst(lw.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.encoder)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 3:
                self.unfreeze_and_add_param_group(pl_module.encoder, optimizer)
    ```

    Checkpoints contain the settings of each group and the names of its parameters, in Lightning's format. A resumed run
    adds the groups again that were added during training. With several ranks, gradients of unfrozen parameters are
    averaged from the next step on.

    Raises:
        ConfigError: The strategy is DeepSpeed, whose optimizers do not accept further groups.
        CheckpointError: A parameter of a saved group is not in the module.
    """

    # Subclasses of libraries read these two, and call `_store` and `_apply_mapping_to_param_groups`.
    _internal_optimizer_metadata: dict[int, list[ParamGroup]]  # each group of each optimizer, with names
    _restarting: bool  # whether a state was loaded and training has not begun

    def __init__(self) -> None:
        self._internal_optimizer_metadata = {}
        self._restarting = False
        self._lw_untracked: list[str] = []  # batch norms whose running statistics are frozen
        self._lw_loaded_untracked: list[str] | None = None  # those of a checkpoint

    # --- what subclasses define ------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: AnyModule) -> None:
        """Freeze the parts that are not trained at first. Called at the start of fit, before optimizers are created."""
        raise NotImplementedError(f"{type(self).__name__} has to define freeze_before_training(pl_module)")

    def finetune_function(self, pl_module: AnyModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the parts that are due. Called at the start of each epoch (from 0), once for each optimizer."""
        raise NotImplementedError(f"{type(self).__name__} has to define finetune_function(pl_module, epoch, optimizer)")

    # --- what they use ---------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the submodules, and the modules themselves, that have direct parameters or no children."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            return [one for part in modules for one in BaseFinetuning.flatten_modules(part)]
        return [one for one in modules.modules() if not list(one.children()) or one._parameters]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Generator[nn.Parameter, None, None]:
        """Yield the trainable parameters; with requires_grad=False, the frozen ones.

        Args:
            modules: A module, or any structure of modules.
            train_bn: Whether parameters of batch norms are included.
            requires_grad: Value of `requires_grad` of the parameters to yield.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and not train_bn:
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and let batch norms update running statistics.

        Weights of integers, which `BitsandbytesPrecision` has packed, have no gradient and stay frozen.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = parameter.is_floating_point() or parameter.is_complex()

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the direct parameters of a module, and a batch norm's running statistics."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters.

        Args:
            modules: A module, or any structure of modules.
            train_bn: Whether batch norms stay trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have yet; warn about the others."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new: list[nn.Parameter] = []
        old: list[nn.Parameter] = []
        for parameter in params:
            (old if id(parameter) in known else new).append(parameter)
        if old:
            warn(
                f"{len(old)} parameters that are unfrozen are in {type(optimizer).__name__} already and stay in their "
                "groups; leave frozen parameters out in configure_optimizers: "
                "filter(lambda p: p.requires_grad, self.parameters())"
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and train them in their own parameter group.

        Args:
            modules: A module, or any structure of modules.
            optimizer: The optimizer to add the group to.
            lr: Learning rate of the group; None is the rate of the first group divided by `initial_denom_lr`.
            initial_denom_lr: Divisor of the default rate; see `lr`.
            train_bn: Whether parameters of batch norms are added to the group.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        # Batch norms, say, that were never frozen: they stay in their group, without a warning.
        trained = {id(parameter) for parameter in BaseFinetuning.filter_params(modules)} & known
        BaseFinetuning.make_trainable(modules)
        first = optimizer.param_groups[0]
        rate = float(first["lr"]) / initial_denom_lr if lr is None else lr
        chosen = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        parameters = BaseFinetuning.filter_on_optimizer(optimizer, (one for one in chosen if id(one) not in trained))
        if parameters:
            group: ParamGroup = {"params": parameters, "lr": rate}
            if "initial_lr" in first:  # schedules look for it in every group
                group["initial_lr"] = rate
            optimizer.add_param_group(group)

    # --- hooks -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Freeze at the beginning of fit."""
        if stage != "fit":
            return
        if trainer.strategy.traits.owns_optimizers:
            raise ConfigError(
                f"{type(self).__name__}: DeepSpeed's optimizers take no parameter groups during training.",
                fix="use another strategy, or freeze permanently with requires_grad=False.",
            )
        self._internal_optimizer_metadata, self._restarting, self._lw_loaded_untracked = {}, False, None
        self.freeze_before_training(pl_module)
        self._lw_untracked = _untracked(pl_module)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Store the saved groups for `restore_param_groups`."""
        self._restarting = True
        groups = state_dict["internal_optimizer_metadata"]
        self._internal_optimizer_metadata = {int(index): list(of_one) for index, of_one in groups.items()}
        self._lw_loaded_untracked = state_dict.get("untracked_norms")

    def state_dict(self) -> StateDict:
        """Return each group with the names of its parameters, and frozen batch norms."""
        return {
            "internal_optimizer_metadata": dict(self._internal_optimizer_metadata),
            "untracked_norms": list(self._lw_untracked),
        }

    def restore_param_groups(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Give optimizers the groups of the checkpoint: more than `configure_optimizers` made, or fewer than now."""
        known = dict(pl_module.named_parameters())
        for index, optimizer in enumerate(trainer.optimizers):
            saved = self._internal_optimizer_metadata.get(index, [])
            missing = [name for group in saved for name in group["params"] if name not in known]
            if missing:
                raise CheckpointError(
                    f"{type(self).__name__}: the checkpoint trains parameters that the module does not have: "
                    f"{', '.join(missing)}.",
                    fix="resume with the module of the run that saved it.",
                )
            _restore_groups(optimizer, self._apply_mapping_to_param_groups(saved, known))

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Freeze running statistics of batch norms as in the checkpoint."""
        self._restarting = False
        if self._lw_loaded_untracked is not None:
            for path, module in pl_module.named_modules():
                if isinstance(module, _BatchNorm):
                    module.track_running_stats = path not in self._lw_loaded_untracked
            self._lw_loaded_untracked = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Let the subclass unfreeze, and record the groups."""
        for index, optimizer in enumerate(trainer.optimizers):
            count = len(optimizer.param_groups)
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            self._store(pl_module, index, count, optimizer.param_groups)
        if len(trainer.optimizers) > 1 and getattr(pl_module, "automatic_optimization", True):
            self._lw_check_joint(trainer.optimizers)
        self._lw_untracked = _untracked(pl_module)

    def _lw_check_joint(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse a parameter that was added to two optimizers, which both step."""
        held = [id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        if len(set(held)) < len(held):
            raise ConfigError(
                f"{type(self).__name__}: expected each parameter in one optimizer, got {len(held) - len(set(held))} in "
                "two.",
                fix="let finetune_function, which is called for each optimizer, add a module to one of them.",
            )

    def _store(
        self,
        pl_module: AnyModule,
        opt_idx: int,
        num_param_groups: int,
        current_param_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Note the groups of an optimizer: all of them at first, later those that were added.

        Args:
            pl_module: Has the parameters.
            opt_idx: Index of the optimizer.
            num_param_groups: Number of groups that are noted already.
            current_param_groups: The optimizer's groups.
        """
        name_of = {parameter: name for name, parameter in pl_module.named_parameters()}
        noted = self._internal_optimizer_metadata.setdefault(opt_idx, [])
        new = current_param_groups[min(num_param_groups, len(noted)) :]
        noted.extend(self._apply_mapping_to_param_groups(new, name_of))

    @staticmethod
    def _apply_mapping_to_param_groups(
        param_groups: Sequence[Mapping[str, Any]], mapping: Mapping[Any, Any]
    ) -> list[ParamGroup]:
        """Return groups with their settings, and names in place of parameters or the reverse."""
        return [{**group, "params": [mapping[one] for one in group["params"]]} for group in param_groups]


class BackboneFinetuning(BaseFinetuning):
    """Train the head first; from an epoch on, also train `pl_module.backbone`, at a rate that rises to the head's.

    Args:
        unfreeze_backbone_at_epoch: First epoch of the backbone, counted from 0.
        lambda_func: Function `epoch -> factor`, called with the epoch counted from 1. The backbone's rate is multiplied
            by the factor at the start of each later epoch.
        backbone_initial_ratio_lr: The backbone's first rate, as a fraction of the head's.
        backbone_initial_lr: The backbone's first rate; None uses the fraction.
        should_align: Whether the backbone's rate is limited to the head's.
        initial_denom_lr: Accepted for compatibility; the first rate is never divided by it.
        train_bn: Whether to train the backbone's batch norms from the beginning.
        verbose: Whether both rates are logged at each epoch.
        rounding: Number of digits of the logged rates.

    Raises:
        ConfigError: An argument is invalid, or the module has no `backbone`.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        problems = []
        if not isinstance(unfreeze_backbone_at_epoch, int) or unfreeze_backbone_at_epoch < 0:
            problems.append(f"unfreeze_backbone_at_epoch={unfreeze_backbone_at_epoch!r} (expected 0 or more)")
        if not callable(lambda_func):
            problems.append(f"lambda_func={lambda_func!r} (expected a function of the epoch)")
        if backbone_initial_lr is None and not backbone_initial_ratio_lr > 0:
            problems.append(f"backbone_initial_ratio_lr={backbone_initial_ratio_lr!r} (expected a positive number)")
        if backbone_initial_lr is not None and not backbone_initial_lr > 0:
            problems.append(f"backbone_initial_lr={backbone_initial_lr!r} (expected a positive number, or None)")
        if problems:
            raise ConfigError(f"BackboneFinetuning: {', '.join(problems)}.", fix="correct these arguments.")
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def freeze_before_training(self, pl_module: AnyModule) -> None:
        """Freeze the backbone."""
        backbone = getattr(pl_module, "backbone", None)
        if not isinstance(backbone, nn.Module):
            raise ConfigError(
                f"BackboneFinetuning: {type(pl_module).__name__}.backbone is {type(backbone).__name__}, expected a "
                "module.",
                fix="name the part that is to be frozen first `backbone`, or subclass BaseFinetuning.",
            )
        self.previous_backbone_lr = None
        self.freeze(backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: AnyModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone when it is time, and raise its rate in later epochs."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        backbone: nn.Module = pl_module.backbone
        head_lr = float(optimizer.param_groups[0]["lr"])
        if self.previous_backbone_lr is None:
            rate = self.backbone_initial_lr
            rate = head_lr * self.backbone_initial_ratio_lr if rate is None else rate
            self.previous_backbone_lr = rate
            self.unfreeze_and_add_param_group(backbone, optimizer, lr=rate, train_bn=self.train_bn)
        else:
            group = _group_within(optimizer, backbone)
            if group is None:  # another optimizer has it, or the user put it into one group with the head
                return
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, head_lr) if self.should_align else rate
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            self.previous_backbone_lr = rate
        if self.verbose:
            _log.info(
                "epoch %d: learning rate of the head %s, of the backbone %s",
                epoch,
                round(head_lr, self.rounding),
                round(rate, self.rounding),
            )

    def state_dict(self) -> StateDict:
        """Return the groups and the backbone's rate."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the groups and the backbone's rate."""
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _restore_groups(optimizer: Optimizer, groups: list[ParamGroup]) -> None:
    """Give an optimizer the groups of a checkpoint: those it does not have yet, or all where it has others."""
    have = [{id(one) for one in group["params"]} for group in optimizer.param_groups]
    saved = [{id(one) for one in group["params"]} for group in groups]
    if saved[: len(have)] == have:
        for group in groups[len(have) :]:
            optimizer.add_param_group(group)
    elif groups:
        optimizer.param_groups = groups


def _untracked(module: nn.Module) -> list[str]:
    return [path for path, one in module.named_modules() if isinstance(one, _BatchNorm) and not one.track_running_stats]


def _group_within(optimizer: Optimizer, module: nn.Module) -> ParamGroup | None:
    """Return the last group that holds parameters of this module only."""
    own = {id(parameter) for parameter in module.parameters()}
    group: ParamGroup
    for group in reversed(optimizer.param_groups):
        if group["params"] and all(id(parameter) in own for parameter in group["params"]):
            return group
    return None
