"""`RecipeModule`: training and validation of a language model on the batches of `RecipeData`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from ..errors import CheckpointError, ConfigError
from ..precision.float8 import Float8Precision
from ..trainer.chunked_cross_entropy import default_chunk_size
from ..trainer.loop.loss import Loss
from ..trainer.module import Module
from .loss import (
    ModelParts,
    RouterLoss,
    find_parts,
    find_router_loss,
    full_loss,
    hidden_states,
    select_trained,
    selected_loss,
)
from .model.adapters import adapter_plan
from .model.fingerprint import fingerprint_of_folder, fingerprint_problems
from .model.loading import ModelSettings, open_model, settings_as_dict, skeleton
from .optimizer import OptimizerSettings, make_optimizers, make_schedule
from .self_check import (
    check_own_loss,
    check_packing,
    compare_packing,
    has_experts,
    is_head_alone,
    no_trained_token,
    own_output,
    without_dropout,
)
from .strategy_checks import strategy_problems

__all__ = ["OptimizerSettings", "RecipeModule", "block_classes", "strategy_problems"]

# Any in this file: batches, checkpoints, and models of transformers.

logger = logging.getLogger(__name__)

_RECENT = 4096  # micro-batches; losses are looked at more often


class RecipeModule(Module):
    """Trains `model`, which `configure_model` opens.

    The first batch is checked: packed samples must not influence each other (`check_packing`), and logits must be those
    of the output layer, or all of them are computed at once.

    Args:
        model: What model.
        optimizer: How it is trained.
        num_steps: Number of optimizer steps of the entire run, for the schedule.
        chunk_tokens: Trained tokens whose logits exist at once; None chooses by the size of the vocabulary, 0 computes
            the logits of all tokens, without labels as well.
        verify_packing: Whether rows hold several samples, so that the first batch is checked.

    Attributes:
        model: The model of transformers, or the PeftModel around it; None before `configure_model`.
        notes: Deviations from the settings, as sentences.
        grad_norm: Norm of the last step's gradients before clipping, shape (), on the device; None without clipping.
        learning_rates: That of the last step, of each group of parameters.
        recent: The latest micro-batches: index in the epoch, the rows, and `grad_norm` of the step before.
    """

    def __init__(
        self,
        model: ModelSettings,
        optimizer: OptimizerSettings,
        num_steps: int,
        *,
        chunk_tokens: int | None = None,
        verify_packing: bool = True,
    ) -> None:
        super().__init__()
        self.settings, self.optimizer_settings, self.num_steps = model, optimizer, num_steps
        self.chunk_tokens, self.verify_packing = chunk_tokens, verify_packing
        self.exclude_frozen_parameters = model.lora is not None
        self.model: Any = None
        self.notes: list[str] = []
        self.grad_norm: Tensor | None = None
        self.learning_rates: dict[str, float] = {}
        self.recent: deque[tuple[int, Tensor | None, Tensor | None]] = deque(maxlen=_RECENT)
        self._fingerprint: dict[str, object] | None = None
        self._is_checked = False
        self._parts: ModelParts | None = None  # not registered: its modules are those of `model`
        self._router: RouterLoss | None = None
        self._sizes: Mapping[str, int] = {}
        self._trained: Tensor | float = 0

    # -- building ------------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if self._lw_trainer is not None:
            strategy = self._lw_trainer.strategy
            problems = strategy_problems(self.settings, strategy, packing=self.verify_packing)
            if problems:
                raise ConfigError("\n".join(problems), fix="choose another strategy, or other settings of the model.")
            self._sizes = strategy.traits.model_axes
        self._is_checked = False
        if self.model is None:
            self.model = open_model(self.settings)
        router = find_router_loss(self.model, self.settings.router_aux_loss_coef)
        self._router = router if router is not None and router.weight else None

    def tensor_plan(self) -> dict[str, str] | None:
        """Return how `tp` splits a model with adapters; None leaves it to the plan of transformers."""
        if self.settings.lora is None or self.model is None:
            return None
        base = self.model.get_base_model()
        return {f"model.base_model.model.{name}": style for name, style in adapter_plan(base, base.tp_plan).items()}

    @override
    def configure_optimizers(self) -> Any:
        settings, optimizers = self.optimizer_settings, make_optimizers(self.optimizer_settings, self)
        ranks = 1 if self._lw_trainer is None else self._lw_trainer.strategy.topology.data_size
        schedules = [make_schedule(settings, one, self.num_steps, data_ranks=ranks) for one in optimizers]
        return optimizers, [{"scheduler": one, "interval": "step"} for one in schedules]

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Loss:
        if not self._is_checked:
            self._check(batch)
        self.recent.append((batch_idx, batch.get("rows"), self.grad_norm))
        loss, router_loss = self._loss(batch, self._router)
        self._trained = self._trained + loss.weight
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        if router_loss is None or self._router is None:
            return loss
        self.log("router_aux_loss", router_loss, sync_dist=True)
        return Loss(loss.sum + self._router.weight * router_loss.sum, loss.weight)

    @override
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.grad_norm = self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        groups = enumerate(optimizer.param_groups)
        self.learning_rates = {str(group.get("name", number)): group["lr"] for number, group in groups}

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._loss(batch)[0], prog_bar=True, sync_dist=True)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return select_trained(batch) if self._may_select else batch

    @override
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0 and not any(self.trainer.strategy.gather_objects(float(self._trained))):
            raise no_trained_token()

    @property
    def _may_select(self) -> bool:
        """Whether the strategy leaves batches and the parts of the model as they are."""
        return self.chunk_tokens != 0 and not {"pp", "cp"} & self._sizes.keys()

    def _loss(self, batch: Mapping[str, Any], router: RouterLoss | None = None) -> tuple[Loss, Loss | None]:
        if self._parts is None:
            return full_loss(self.model, batch, router=router, has_positions="cp" not in self._sizes)
        if "order" not in batch:
            batch = select_trained(batch)
        chunk = self.chunk_tokens or default_chunk_size(self.model.config.get_text_config().vocab_size)
        return selected_loss(self._parts, batch, chunk, router=router, calls_head="tp" in self._sizes)

    def _check(self, batch: Mapping[str, Any]) -> None:
        """Check the model with the first batch, on all ranks at once."""
        self._is_checked = True
        ids = batch["input_ids"]
        parts = find_parts(self.model) if self._may_select else None
        precision = self.trainer.precision_plugin
        plain = precision.plain_products(self.model) if isinstance(precision, Float8Precision) else nullcontext()
        with without_dropout(self.model), plain:
            if not {"pp", "cp"} & self._sizes.keys():
                output = own_output(self.model, ids)
                if self.settings.router_aux_loss_coef != 0:
                    check_own_loss(output, find_router_loss(self.model))
                if parts is not None and not is_head_alone(output, parts):
                    parts = None
            if self.verify_packing and "pp" not in self._sizes:
                forward = self._logits if parts is None else partial(hidden_states, parts)
                found, dtype = compare_packing(forward, ids), precision.policy.compute_dtype
                check_packing(found, has_experts=has_experts(self.model), dtype=dtype)
        self.__dict__["_parts"] = parts
        if parts is None and self.chunk_tokens != 0:
            self._note_full()

    def _logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits

    def _note_full(self) -> None:
        axes = ", ".join(sorted({"pp", "cp"} & self._sizes.keys()))
        why = f"the mesh has the axis {axes}" if axes else "the model computes more than its output layer on them"
        note = f"The logits of all tokens are computed at once, because {why}."
        if note not in self.notes:
            self.notes.append(note)
            if self.trainer.is_global_zero:
                logger.info(note)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["recipe"] = {"model": settings_as_dict(self.settings), "fingerprint": self._base()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = (checkpoint.get("recipe") or {}).get("fingerprint")
        if self.settings.lora is None or stored is None:
            return
        problems = fingerprint_problems(stored, self.settings.location)
        if problems:
            raise CheckpointError(
                f"Expected the base model that the adapters of the checkpoint belong to, got {self.settings.model}: "
                + " ".join(problems),
                fix=f"pass that base: model={checkpoint['recipe']['model']['model']} when the checkpoint was saved.",
            )

    def _base(self) -> dict[str, object] | None:
        """Return the fingerprint of a base that checkpoints leave out; None where they hold all weights."""
        if self.settings.lora is None or not Path(self.settings.location).is_dir():
            return None
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of_folder(self.settings.location)
        return self._fingerprint


def block_classes(settings: ModelSettings) -> set[str]:
    """Return the names of the model's block classes, for `auto_wrap_policy` and `activation_checkpointing_policy`."""
    model: nn.Module = skeleton(settings)
    found = {type(one).__name__ for one in model.modules()}
    return set(getattr(model, "_no_split_modules", None) or ()) & found
