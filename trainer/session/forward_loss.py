"""Steps and an optimizer for Hugging Face models, whose `forward` returns a loss: they are trained as they are.

A model from transformers or peft has no `training_step`. It gets the same steps for every model, as attributes of the
instance, so that its class, its parameters' names and its `save_pretrained` are unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...data import find_batch_size
from ...errors import ModuleError
from ..hooks import MODULE_BASES, find_override

_KEYS = {"training_step": "train_loss", "validation_step": "val_loss", "test_step": "test_loss", "predict_step": None}
_CLASSES = (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))
_LR = 5e-5  # the default of transformers' Trainer


class ForwardStep:
    """A step that calls the model with the batch's entries as keyword arguments, and takes its loss.

    Args:
        model: The model; its `forward` returns an output with `loss`, or a tuple that begins with it.
        key: Name under which the loss is logged; None for prediction, which returns the output.

    Attributes:
        log: The run's `log`; None between runs.
    """

    is_forward_step = True

    def __init__(self, model: nn.Module, key: str | None) -> None:
        self.model, self.key = model, key
        self.log: Callable[..., object] | None = None

    def __call__(self, batch: object, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:  # Any: the model's output
        """Return the loss of a batch, or the model's output in prediction.

        Raises:
            ModuleError: The batch is not a mapping, or the model returns no loss for it.
        """
        name = type(self.model).__name__
        if not isinstance(batch, Mapping):
            raise ModuleError(
                f"{name} is called with the batch's entries by name, but the batch is {type(batch).__name__}.",
                fix="return dicts from the data set, such as {'input_ids': ..., 'labels': ...}.",
            )
        output = self.model(**batch)
        if self.key is None:
            return output
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise ModuleError(
                f"{name}.forward returned no loss for a batch with {', '.join(sorted(map(str, batch)))}.",
                fix="add 'labels' to the batch, or write a lw.Module with a training_step.",
            )
        if self.log is not None:
            self.log(self.key, loss, prog_bar=True, batch_size=find_batch_size(batch))
        return loss

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "log": None}  # it belongs to a run


class ForwardOptimizer:
    """`configure_optimizers` of a model that has none: AdamW over what is trained."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=_LR, weight_decay=0.0)


def equip(module: nn.Module, verb: str) -> None:
    """Give steps and an optimizer to a Hugging Face model without `training_step`; other modules stay as they are.

    A `configure_optimizers` that was set on the instance is kept. The model is put into training mode before a fit:
    `from_pretrained` returns it in evaluation mode.
    """
    own = find_override(module, "training_step", MODULE_BASES)
    if not (own is None or isinstance(own, ForwardStep)) or not _is_pretrained(module):
        return
    for name, key in _KEYS.items():
        if find_override(module, name, MODULE_BASES) is None:
            module.__dict__[name] = ForwardStep(module, key)
    if find_override(module, "configure_optimizers", MODULE_BASES) is None:
        module.__dict__["configure_optimizers"] = ForwardOptimizer(module)
    if verb == "fit":
        module.train()


def _is_pretrained(module: nn.Module) -> bool:
    """Whether the module is a model of transformers or peft; neither is imported for the question."""
    classes = (getattr(sys.modules.get(package), name, None) for package, name in _CLASSES if package in sys.modules)
    return any(isinstance(module, one) for one in classes if isinstance(one, type))
