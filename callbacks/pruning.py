"""`ModelPruning`: sets a part of the weights to zero during training and keeps them there.

The methods of `torch.nn.utils.prune` select the weights. Unlike in torch, the module's parameters are not replaced and
keep their names: masks are applied to gradients before each optimizer step and to weights after it. The weights are the
same as torch's `weight_orig * weight_mask`, and checkpoints, averages and wrappers need no special handling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.hooks import RemovableHandle

from ..errors import CheckpointError, ConfigError, ModuleError, nearest
from ..protocols import Options
from .averaging.weights import clean_name, refuse_shards
from .base import AnyModule, Callback, from_rank_zero

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..protocols import AnyBatch, StateDict
    from ..trainer import Trainer

_log = logging.getLogger(__name__)

Pair = tuple[nn.Module, str]

METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "l1_unstructured": prune.L1Unstructured,
    "random_unstructured": prune.RandomUnstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
}
_DEFAULT_NAMES = ("weight", "bias")


class ModelPruning(Callback):
    """Set the least important weights to zero at the end of each epoch and keep them there.

    `amount` applies to the remaining weights: with 0.5, a half, a quarter, an eighth, ... of all weights remain.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured", or a subclass of
            `torch.nn.utils.prune.BasePruningMethod` for unstructured pruning across all parameters.
        parameters_to_prune: Pairs of a submodule and a parameter name; empty: all parameters of `parameter_names`.
        parameter_names: Names of the parameters to prune in all submodules; None: ("weight", "bias").
        use_global_unstructured: Whether weights are ranked across all parameters; otherwise each parameter loses the
            same fraction.
        amount: Fraction (float from 0 to 1) or number of weights to prune each time, or `epoch -> amount`; 0: none.
        apply_pruning: Whether to prune, or `epoch -> whether to prune`.
        make_pruning_permanent: Whether the module has plain parameters with zeros at the end of training. Otherwise
            it has `<name>_orig` and `<name>_mask` of `torch.nn.utils.prune`, for further training in a custom loop.
        use_lottery_ticket_hypothesis: Whether to reset the remaining weights to their initial values, or
            `epoch -> whether to`. They are reset when the next epoch begins; after the last epoch they stay trained.
        resample_parameters: Whether they are instead initialized again by the submodule's `reset_parameters`.
        pruning_dim: Dimension along which structured pruning removes slices.
        pruning_norm: Norm of "ln_structured".
        verbose: Level of log messages: 1 for the total sparsity, 2 also for each parameter.
        prune_on_train_epoch_end: Whether to prune at the end of epochs; otherwise after each validation inside fit.

    Raises:
        ConfigError: An argument is invalid; names all of them.
        ModuleError: When fit starts: a parameter to prune is not in the module, or cannot be pruned by this method.

    Masks, and initial weights for the lottery ticket, are saved in the checkpoint; resuming is exact. With several
    ranks, rank 0's masks are used. Sparsity saves neither time nor memory: zeros are stored and multiplied.

    Source of the rewinding: Frankle and Carbin 2019, "The Lottery Ticket Hypothesis".
    """

    changes_weights = True
    replaces_weights = True  # so that a checkpoint after make_pruning_permanent=False has plain names

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod],
        parameters_to_prune: Sequence[Pair] | None = (),
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | float | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        problems = _problems_of_method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        if not callable(amount):
            problems += _problems_of_amount(amount)
        switches = {"apply_pruning": apply_pruning, "use_lottery_ticket_hypothesis": use_lottery_ticket_hypothesis}
        for name, value in switches.items():
            if not isinstance(value, bool) and not callable(value):
                problems.append(f"{name}={value!r} (expected True, False, or a function of the epoch)")
        if verbose not in (0, 1, 2):
            problems.append(f"verbose={verbose!r} (expected 0, 1 or 2)")
        if isinstance(parameter_names, str):
            problems.append(f"parameter_names={parameter_names!r} (expected a list of names)")
        if problems:
            raise ConfigError(f"ModelPruning: {'; '.join(problems)}.", fix="correct these arguments.")
        self.pruning_fn = pruning_fn
        self.parameter_names = tuple(parameter_names or _DEFAULT_NAMES)
        self.use_global_unstructured = use_global_unstructured
        self.amount = amount
        self.resample_parameters = resample_parameters
        self.pruning_dim = pruning_dim
        self.pruning_norm = pruning_norm
        self.verbose = verbose
        self._lw_given = list(parameters_to_prune or ())
        self._lw_applies = apply_pruning
        self._lw_is_permanent = make_pruning_permanent
        self._lw_rewinds = use_lottery_ticket_hypothesis
        self._lw_at_epoch_end = prune_on_train_epoch_end
        self._parameters_to_prune: list[Pair] = []
        self._lw_names: list[str] = []  # of the parameters, in the order of the pairs
        self._lw_parameters: list[nn.Parameter] = []
        self._lw_weights: list[Tensor] = []  # the same ones, as torch's signatures want them
        self._lw_masks: list[Tensor] = []  # 1 where a weight stays; empty before the first pruning
        self._lw_initial: dict[str, Tensor] = {}
        self._lw_loaded: dict[str, Tensor] = {}
        self._lw_pruned_at = -1
        self._lw_is_rewind_due = self._lw_is_due = False
        self._lw_source: nn.Module | None = None
        self._lw_hooks: list[RemovableHandle] = []

    @property
    def state_key(self) -> str:
        """The class name and the arguments that distinguish instances."""
        name = self.pruning_fn if isinstance(self.pruning_fn, str) else self.pruning_fn.__qualname__
        return self._generate_state_key(pruning_fn=name, parameter_names=list(self.parameter_names))

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that are pruned; 0 before the first pruning. Waits for the device."""
        total = sum(mask.numel() for mask in self._lw_masks)
        return 1 - sum(float(mask.sum()) for mask in self._lw_masks) / total if total else 0.0

    # --- what subclasses may override ------------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: Sequence[Pair] = ()) -> list[Pair]:
        """Return the pairs to prune, out of all pairs that were found. Override it to exclude some."""
        return list(parameters_to_prune)

    def apply_pruning(self, amount: int | float) -> None:
        """Choose this fraction or number of the remaining weights; they become zero right afterwards.

        Raises:
            ConfigError: Fewer weights remain.
        """
        weights = [parameter.detach() for parameter in self._lw_parameters]
        masks = self._lw_masks or [torch.ones_like(weight) for weight in weights]
        try:
            if self.use_global_unstructured:
                mask = self._lw_method(amount, torch.cat([one.flatten() for one in weights]),
                                     torch.cat([one.flatten() for one in masks]))  # fmt: skip
                parts = mask.split([one.numel() for one in weights])
                self._lw_masks = [part.view_as(one).contiguous() for part, one in zip(parts, weights, strict=True)]
            else:
                self._lw_masks = [self._lw_method(amount, *pair) for pair in zip(weights, masks, strict=True)]
        except ValueError as error:
            raise ConfigError(f"ModelPruning: amount={amount}: {error}.", fix="prune less.") from error

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the remaining weights to their initial values, or to new random ones."""
        with torch.no_grad():
            if self.resample_parameters:
                self._lw_resample()
            else:
                for name, parameter in zip(self._lw_names, self._lw_parameters, strict=True):
                    parameter.copy_(self._lw_initial[name])
        self._lw_mask_weights()

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Turn `<name>_orig` and `<name>_mask` of `torch.nn.utils.prune` into plain parameters, in all submodules."""
        for child in module.modules():
            for hook in list(child._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(child, hook._tensor_name)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: AnyModule,
        parameters_to_prune: Sequence[Pair] | None = (),
        parameter_names: Sequence[str] | None = (),
    ) -> list[Pair]:
        """Return the given pairs; without any, the pairs of all submodules that have a parameter of these names.

        Raises:
            ModuleError: A pair is invalid, its submodule is not in the module, or the parameter does not exist; or no
                parameter was found.
        """
        children = {id(child) for child in pl_module.modules()}
        if parameters_to_prune:
            problems = []
            for pair in parameters_to_prune:
                if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], nn.Module):
                    problems.append(f"{pair!r} is not a pair of a module and a name")
                elif id(pair[0]) not in children:
                    problems.append(f"{type(pair[0]).__name__} is not a submodule of {type(pl_module).__name__}")
                elif not isinstance(pair[0]._parameters.get(pair[1]), nn.Parameter):
                    problems.append(f"{type(pair[0]).__name__} has no parameter {pair[1]!r}"
                                    f"{nearest(str(pair[1]), pair[0]._parameters)}")  # fmt: skip
            if problems:
                raise ModuleError(
                    f"ModelPruning(parameters_to_prune=...): {'; '.join(problems)}.",
                    fix="pass pairs such as (model.layer, 'weight'), of submodules of the module that is trained.",
                )
            return [(module, name) for module, name in parameters_to_prune]
        names = tuple(parameter_names or _DEFAULT_NAMES)
        seen: set[int] = set()
        found = []
        for child in pl_module.modules():
            for name in names:
                parameter = child._parameters.get(name)
                if parameter is not None and id(parameter) not in seen:  # tied ones once
                    seen.add(id(parameter))
                    found.append((child, name))
        if not found:
            own = {name.rpartition(".")[2] for name, _ in pl_module.named_parameters()}
            raise ModuleError(
                f"ModelPruning: {type(pl_module).__name__} has no parameter named {' or '.join(map(repr, names))}; its "
                f"parameters are named {', '.join(sorted(own)) or 'nothing'}.",
                fix="pass parameter_names=[...] or parameters_to_prune=[(module, name), ...].",
            )
        return found

    # --- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Find the parameters, restore masks, keep the initial weights, and register hooks on the optimizers."""
        refuse_shards(trainer, pl_module, owner="ModelPruning")
        if self._lw_source is not None and self._lw_source is not pl_module:
            self._lw_initial, self._lw_loaded, self._lw_masks = {}, {}, []
            self._lw_pruned_at, self._lw_is_rewind_due, self._lw_is_due = -1, False, False
        elif self._lw_source is pl_module and self._lw_masks:
            self._lw_loaded = dict(zip(self._lw_names, self._lw_masks, strict=True))
        self._lw_source = pl_module
        before = self._lw_take_over_masks(pl_module)
        pairs = self.sanitize_parameters_to_prune(pl_module, self._lw_given, self.parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(pairs)
        name_of = {id(one): clean_name(name) for name, one in pl_module.named_parameters()}
        self._lw_parameters = [module._parameters[name] for module, name in self._parameters_to_prune]  # type: ignore[misc]
        self._lw_weights = list(self._lw_parameters)
        self._lw_names = [name_of[id(parameter)] for parameter in self._lw_parameters]
        self._lw_check_shapes()
        self._lw_restore_masks(self._lw_loaded or before)
        self._lw_loaded = {}
        if self._lw_rewinds and not self.resample_parameters and not self._lw_initial:
            pairs_of_names = zip(self._lw_names, self._lw_parameters, strict=True)
            self._lw_initial = {name: parameter.detach().clone() for name, parameter in pairs_of_names}
        self._lw_forget_hooks()
        self._lw_hooks = [
            optimizer.register_step_post_hook(lambda *_: self._lw_mask_weights()) for optimizer in trainer.optimizers
        ]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Rewind the remaining weights, if the last pruning requested it."""
        if self._lw_is_rewind_due:
            self._lw_is_rewind_due = False
            self.apply_lottery_ticket_hypothesis()
            if trainer.ranks_answer and self.resample_parameters:  # each rank has drawn its own
                received = from_rank_zero(trainer, lambda: [one.detach().cpu() for one in self._lw_parameters])
                with torch.no_grad():
                    for parameter, value in zip(self._lw_parameters, received, strict=True):
                        parameter.copy_(value)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Set the gradients of pruned weights to zero before they are clipped."""
        pairs = zip(self._lw_parameters, self._lw_masks, strict=False)  # no masks before the first pruning
        found = [(parameter.grad, mask) for parameter, mask in pairs if parameter.grad is not None]
        if found:
            gradients, masks = zip(*found, strict=True)
            torch._foreach_mul_(list(gradients), list(masks))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Prune at the end of an epoch, but not if a limit interrupted it."""
        if self._lw_is_due or (self._lw_at_epoch_end and not trainer.progress.epoch_paused):
            self._lw_prune(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Prune after a validation inside fit, if requested, and after a checkpoint with its score."""
        if not self._lw_at_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._lw_is_due = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: AnyModule, batch: AnyBatch, batch_idx: int) -> None:
        """Prune, if it is due since the latest validation."""
        if self._lw_is_due:
            self._lw_prune(trainer)

    def on_exception(self, trainer: Trainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Remove the hooks from the optimizers."""
        self._lw_forget_hooks()

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Remove the hooks from the optimizers; convert masks to torch's, unless pruning is made permanent."""
        if stage != "fit":
            return
        self._lw_forget_hooks()
        if not self._lw_is_permanent and self._lw_masks:
            for (module, name), mask in zip(self._parameters_to_prune, self._lw_masks, strict=True):
                prune.custom_from_mask(module, name, mask)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: AnyModule, checkpoint: StateDict) -> None:
        """Fold torch's masks into the weights, in a checkpoint that is saved after fit."""
        weights = checkpoint["state_dict"]
        for name in self._lw_names:
            if f"{name}_orig" in weights and f"{name}_mask" in weights:
                weights[name] = weights.pop(f"{name}_orig") * weights.pop(f"{name}_mask")

    def forget_run(self) -> None:
        """Reset the state of the last run; the masks of its module are kept."""
        self._lw_pruned_at = -1

    def state_dict(self) -> StateDict:
        """Return masks, initial weights, and the last actions."""
        masks = zip(self._lw_names, self._lw_masks, strict=False)
        return {
            "masks": {name: mask.bool() for name, mask in masks},
            "initial": dict(self._lw_initial),
            "pruned_at": self._lw_pruned_at,
            "is_rewind_due": self._lw_is_rewind_due,
            "is_due": self._lw_is_due,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Store the state for `on_fit_start`."""
        self._lw_loaded = dict(state_dict["masks"])
        self._lw_initial = dict(state_dict["initial"])
        self._lw_pruned_at = int(state_dict["pruned_at"])
        self._lw_is_rewind_due = bool(state_dict["is_rewind_due"])
        self._lw_is_due = bool(state_dict.get("is_due", False))
        self._lw_masks, self._lw_source = [], None

    # --- the masks -------------------------------------------------------------------------------------------------

    def _lw_prune(self, trainer: Trainer) -> None:
        self._lw_is_due = False
        epoch, at = trainer.current_epoch, trainer.progress.total_batches
        if at == self._lw_pruned_at:  # a checkpoint was taken within this event, after pruning
            return
        # What users' functions say may follow from chance or clocks: rank 0's holds for all.
        is_asked = any(callable(one) for one in (self._lw_applies, self.amount, self._lw_rewinds))
        amount, rewinds = from_rank_zero(trainer, lambda: self._lw_plan(epoch)) if is_asked else self._lw_plan(epoch)
        if not amount:
            return
        problems = _problems_of_amount(amount)
        if problems:
            raise ConfigError(f"ModelPruning: in epoch {epoch}, {problems[0]}.", fix="return such an amount.")
        self._lw_pruned_at = at
        self.apply_pruning(amount)
        if trainer.ranks_answer:  # chance falls differently on each rank
            masks = from_rank_zero(trainer, lambda: [mask.bool().cpu() for mask in self._lw_masks])
            self._lw_restore_masks(dict(zip(self._lw_names, masks, strict=True)))
        self._lw_mask_weights()
        self._lw_is_rewind_due = rewinds
        if self.verbose and trainer.is_global_zero:
            self._lw_report(epoch)

    def _lw_plan(self, epoch: int) -> tuple[int | float, bool]:
        """Return how much to prune in this epoch, 0 for nothing, and whether to rewind the weights that are left."""
        applies = self._lw_applies(epoch) if callable(self._lw_applies) else self._lw_applies
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not applies or not amount:
            return 0, False
        return amount, bool(self._lw_rewinds(epoch) if callable(self._lw_rewinds) else self._lw_rewinds)

    def _lw_method(self, amount: int | float, weight: Tensor, mask: Tensor) -> Tensor:
        """Return the mask after pruning a tensor whose mask was this one, by torch's rules."""
        options: Options = {"amount": amount}
        if self.pruning_fn in ("ln_structured", "random_structured"):
            options["dim"] = self.pruning_dim
        if self.pruning_fn == "ln_structured":
            options["n"] = self.pruning_norm
        kind = METHODS[self.pruning_fn] if isinstance(self.pruning_fn, str) else self.pruning_fn
        method = kind(**options)
        # The container applies a method to what earlier ones have left; it wants both to be of one tensor.
        container = prune.PruningContainer()
        container._tensor_name = method._tensor_name = "weight"
        container.add_pruning_method(method)
        masked: Tensor = container.compute_mask(weight, mask)
        return masked

    def _lw_mask_weights(self) -> None:
        if self._lw_masks:
            with torch.no_grad():
                torch._foreach_mul_(self._lw_weights, self._lw_masks)

    def _lw_restore_masks(self, masks: dict[str, Tensor]) -> None:
        if not masks:
            self._lw_masks = []
            return
        wrong = [name for name, parameter in zip(self._lw_names, self._lw_parameters, strict=True)
                 if name not in masks or masks[name].shape != parameter.shape]  # fmt: skip
        wrong += [name for name in masks if name not in self._lw_names]
        if wrong:
            raise CheckpointError(
                f"ModelPruning: the masks do not fit the parameters to prune: {', '.join(wrong)}.",
                fix="resume with the module and the arguments of the run that saved them.",
            )
        pairs = zip(self._lw_names, self._lw_parameters, strict=True)
        self._lw_masks = [masks[name].to(device=one.device, dtype=one.dtype) for name, one in pairs]
        self._lw_mask_weights()

    def _lw_take_over_masks(self, module: nn.Module) -> dict[str, Tensor]:
        """Return masks of torch, and make the parameters plain ones: an earlier fit left them, or the user's hands."""
        masks = {
            clean_name(name.removesuffix("_mask")): buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if name.endswith("_mask")
        }
        if not masks:
            return {}
        self.make_pruning_permanent(module)
        plain = {clean_name(name): one for name, one in module.named_parameters()}
        return {name: mask for name, mask in masks.items() if name in plain and plain[name].shape == mask.shape}

    def _lw_check_shapes(self) -> None:
        if self.pruning_fn not in ("ln_structured", "random_structured"):
            return
        dim = self.pruning_dim or 0
        pairs = list(zip(self._lw_names, self._lw_parameters, strict=True))
        wrong = [
            f"{name} {tuple(one.shape)}" for name, one in pairs if one.dim() < 2 or not -one.dim() <= dim < one.dim()
        ]
        if wrong:
            raise ModuleError(
                f"ModelPruning: {self.pruning_fn} removes slices along dimension {dim}, which these do not have: "
                f"{', '.join(wrong)}.",
                fix="pass parameter_names=['weight'], or parameters_to_prune.",
            )

    def _lw_resample(self) -> None:
        modules = {id(module): module for module, _ in self._parameters_to_prune}
        for key, module in modules.items():
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                continue
            ours = {name for child, name in self._parameters_to_prune if id(child) == key}
            others = {name: one.detach().clone() for name, one in module._parameters.items()
                      if one is not None and name not in ours}  # fmt: skip
            reset()
            for name, value in others.items():
                module._parameters[name].copy_(value)  # type: ignore[union-attr]  # it is in others

    def _lw_report(self, epoch: int) -> None:
        sizes = [mask.numel() for mask in self._lw_masks]
        pruned = [size - int(mask.sum()) for size, mask in zip(sizes, self._lw_masks, strict=True)]
        _log.info("epoch %d: pruned %d of %d weights (%.2f%%)", epoch, sum(pruned), sum(sizes),
                  100 * sum(pruned) / sum(sizes))  # fmt: skip
        if self.verbose == 2:
            for name, count, size in zip(self._lw_names, pruned, sizes, strict=True):
                _log.info("  %s: pruned %d of %d (%.2f%%)", name, count, size, 100 * count / size)

    def _lw_forget_hooks(self) -> None:
        for hook in self._lw_hooks:
            hook.remove()
        self._lw_hooks = []


def _problems_of_method(
    pruning_fn: str | type[prune.BasePruningMethod], is_global: bool, dim: int | None, norm: int | float | None
) -> list[str]:
    if isinstance(pruning_fn, str):
        if pruning_fn not in METHODS:
            return [f"pruning_fn={pruning_fn!r} is unknown{nearest(pruning_fn, METHODS)} (known: {', '.join(METHODS)})"]
        problems = []
        if pruning_fn.endswith("_structured"):
            if is_global:
                problems.append(f"use_global_unstructured=True with {pruning_fn!r} (pass False)")
            if dim is None:
                problems.append(f"{pruning_fn!r} needs pruning_dim")
            if pruning_fn == "ln_structured" and norm is None:
                problems.append("'ln_structured' needs pruning_norm")
        return problems
    if not isinstance(pruning_fn, type) or not issubclass(pruning_fn, prune.BasePruningMethod):
        return [f"pruning_fn={pruning_fn!r} (expected {', '.join(METHODS)}, or a class of BasePruningMethod)"]
    problems = []
    if not is_global:
        problems.append(f"{pruning_fn.__name__} needs use_global_unstructured=True")
    kind = getattr(pruning_fn, "PRUNING_TYPE", None)
    if kind != "unstructured":
        problems.append(f"{pruning_fn.__name__} has PRUNING_TYPE={kind!r} (expected 'unstructured')")
    return problems


def _problems_of_amount(amount: int | float) -> list[str]:
    is_part = isinstance(amount, float) and 0.0 <= amount <= 1.0
    is_count = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
    return (
        []
        if is_part or is_count
        else [f"amount={amount!r} (expected a float from 0.0 to 1.0, an integer >= 0, or a function of the epoch)"]
    )
