"""`ModelPruning` as in Lightning: `torch.nn.utils.prune` rebuilds the module, so that its parameters have new names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ....callbacks import pruning
from ....protocols import AnyBatch, StateDict
from ....trainer.trainer import Trainer
from ..module import LightningModule

__all__ = ["ModelPruning"]

_CONTAINERS = (LightningModule, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FUNCTIONS: dict[str, Any] = {  # Any: not all of them are annotated by torch
    "ln_structured": prune.ln_structured,
    "l1_unstructured": prune.l1_unstructured,
    "random_structured": prune.random_structured,
    "random_unstructured": prune.random_unstructured,
}


class ModelPruning(pruning.ModelPruning):
    """Prunes at the end of an epoch: from then on the module has `<name>_orig` and `<name>_mask`.

    Weights are rewound right after pruning. Checkpoints have plain names if pruning is to be permanent. The arguments
    are those of `loopwright.ModelPruning`.
    """

    changes_weights = False
    replaces_weights = False

    @property
    def sparsity(self) -> float:
        """The pruned fraction of the weights; 0 before the first pruning. Reads the device."""
        masks = [getattr(module, f"{name}_mask", None) for module, name in self._parameters_to_prune]
        pruned = [mask for mask in masks if mask is not None]
        total = sum(mask.numel() for mask in pruned)
        return 1 - sum(float(mask.sum()) for mask in pruned) / total if total else 0.0

    def setup(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Find the parameters, and copy the layers that they are in."""
        given = self._parameters_to_prune or self._lw_given
        pairs = self.sanitize_parameters_to_prune(pl_module, given, self.parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(pairs)
        self._lw_first_layers: dict[int, nn.Module] = {}
        if self._lw_rewinds:
            for module, _ in self._parameters_to_prune:
                if id(module) not in self._lw_first_layers:
                    self._lw_first_layers[id(module)] = copy.deepcopy(module)

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module,
        parameters_to_prune: Sequence[pruning.Pair] | None = (),
        parameter_names: Sequence[str] | None = (),
    ) -> list[pruning.Pair]:
        """Return the given pairs, or without any those of all layers, ordered by name.

        Raises:
            ModuleError: See `loopwright.ModelPruning`.
        """
        if parameters_to_prune:
            return pruning.ModelPruning.sanitize_parameters_to_prune(pl_module, parameters_to_prune, parameter_names)
        layers = [one for one in pl_module.modules() if not isinstance(one, _CONTAINERS)]
        names = parameter_names or ("weight", "bias")
        return [(one, name) for name in names for one in layers if isinstance(getattr(one, name, None), nn.Parameter)]

    def apply_pruning(self, amount: int | float) -> None:
        """Prune this part or number of the weights that are left."""
        if self.use_global_unstructured:
            known = pruning.METHODS
            method = known[self.pruning_fn] if isinstance(self.pruning_fn, str) else self.pruning_fn
            prune.global_unstructured(self._parameters_to_prune, pruning_method=method, amount=amount)
            return
        assert isinstance(self.pruning_fn, str)
        options: dict[str, Any] = {"amount": amount}
        if self.pruning_fn.endswith("_structured"):
            options["dim"] = self.pruning_dim
        if self.pruning_fn == "ln_structured":
            options["n"] = self.pruning_norm
        for module, name in self._parameters_to_prune:
            _FUNCTIONS[self.pruning_fn](module, name=name, **options)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset weights to their initial values, or to new random ones; one draw for each layer."""
        drawn: dict[int, nn.Module] = {}
        for module, _ in self._parameters_to_prune:
            first = self._lw_first_layers[id(module)]
            reset = getattr(first, "reset_parameters", None)
            if id(module) not in drawn:
                drawn[id(module)] = first
                if self.resample_parameters and callable(reset):
                    drawn[id(module)] = copy.deepcopy(first)
                    drawn[id(module)].reset_parameters()  # type: ignore[operator]
        for module, name in self._parameters_to_prune:
            target, source = getattr(module, f"{name}_orig", getattr(module, name, None)), drawn[id(module)]
            value = getattr(source, name)
            if isinstance(target, Tensor) and isinstance(value, Tensor):
                target.data = value.data.to(target.device)

    def _lw_prune(self, trainer: Trainer) -> None:
        amount, rewinds = self._lw_plan(trainer.current_epoch)
        if not amount:
            return
        self.apply_pruning(amount)
        if rewinds:
            self.apply_lottery_ticket_hypothesis()

    # --- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: AnyBatch, batch_idx: int) -> None:
        """Do nothing."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Do nothing."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Prune, if it is to happen at the end of epochs."""
        if self._lw_at_epoch_end:
            self._lw_prune(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Prune, if it is to happen after validations."""
        if not self._lw_at_epoch_end and not trainer.sanity_checking:
            self._lw_prune(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Replace the pruned parameters by plain ones, if pruning is to be permanent."""
        if self._lw_is_permanent:
            self.make_pruning_permanent(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Do nothing."""

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Do nothing."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Fold masks into the weights, if pruning is to be permanent."""
        if not self._lw_is_permanent:
            return
        weights = dict(checkpoint["state_dict"])
        for key in [key for key in weights if key.endswith("_mask")]:
            name = key.removesuffix("_mask")
            original, mask = weights.pop(f"{name}_orig"), weights.pop(key)
            weights[name] = mask.to(dtype=original.dtype) * original
        checkpoint["state_dict"] = weights

    def state_dict(self) -> StateDict:
        """Return nothing: masks are in the module."""
        return {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Do nothing: masks are in the module."""
