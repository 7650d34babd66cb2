"""Loss of a model over the trained tokens of data."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...trainer.chunked_cross_entropy import default_chunk_size
from ...trainer.loop.loss import Loss
from ..data import DataSettings, RecipeData
from ..inference.model import num_embeddings, raise_problems
from ..loss import find_parts, full_loss, select_trained, selected_loss
from ..self_check import is_head_alone, own_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any in this file: models of transformers, and settings from YAML.

Batch = dict[str, Tensor]
LossFunction = Callable[[Mapping[str, Any]], tuple[Loss, Loss | None]]


@dataclass(frozen=True)
class MeanLoss:
    """Cross entropy over tokens.

    Attributes:
        loss: Mean over tokens, in nats.
        tokens: Number of trained tokens.
        rows: Number of rows.
    """

    loss: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.inference_mode()
def mean_loss(model: Any, batches: Iterable[Batch], *, limit: int | None = None) -> MeanLoss:
    """Return the loss over all trained tokens of the batches, each token once.

    Args:
        model: A model of transformers, in evaluation mode.
        batches: From `RecipeData`.
        limit: Largest number of batches; None for all.
    """
    device = next(iter(model.parameters())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    loss_of: LossFunction | None = None
    tokens = rows = 0
    for batch in islice(batches, limit):
        chosen = select_trained(batch)
        moved = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in chosen.items()}
        loss_of = loss_of or _loss_function(model, moved["input_ids"])
        total += loss_of(moved)[0].sum
        tokens += chosen["num_trained"]
        rows += len(batch["labels"])
    return MeanLoss(float(total) / tokens if tokens else math.nan, tokens, rows)


def _loss_function(model: Any, ids: Tensor) -> LossFunction:
    """Return how a batch's loss is computed: from logits of trained tokens only, where they are the same."""
    parts = find_parts(model)
    if parts is None or not is_head_alone(own_output(model, ids), parts):
        return partial(full_loss, model)
    return partial(selected_loss, parts, chunk=default_chunk_size(model.config.get_text_config().vocab_size))


@contextmanager
def data_batches(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, model: Any, *, is_held_out: bool
) -> Iterator[Iterable[Batch]]:
    """Prepare data and return their batches, each sample once.

    Args:
        settings: What data; without `cache`, the tokens are in a temporary folder.
        tokenizer: The model's.
        model: Its embedding bounds the ids.
        is_held_out: Whether the batches are those of the held-out data, else those of `data`.

    Raises:
        ConfigError: There are problems with the data.
    """
    with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
        data = RecipeData(settings, tokenizer, Path(folder))
        problems = data.problems(vocab_size=num_embeddings(model))
        raise_problems(problems)
        data.prepare_data()
        data.setup("fit")
        loader: Any = data.val_dataloader() if is_held_out else data.train_dataloader()
        yield loader


def held_out_settings(run: Path, settings: Mapping[str, Any]) -> DataSettings | None:
    """Return the data settings of a run, for its held-out data; None if it has none.

    Args:
        run: Its folder.
        settings: As in its recipe.yaml.
    """
    known = {one.name for one in dataclasses.fields(DataSettings)}
    kept = {name: value for name, value in settings.items() if name in known}
    if not kept.get("data") or not (kept.get("val_data") or kept.get("val_fraction")):
        return None
    kept["cache"] = Path(kept["cache"]) if kept.get("cache") else run / "cache"
    return DataSettings(**kept)
