"""`export`: a trained model as a folder that plain transformers and peft load, compared before it is published."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError
from ...messages import counted
from ..data import DataSettings
from ..data.settings import SourceLike
from ..data.shard import publish, temporary_folder
from ..evaluation.held_out import MeanLoss, data_batches, held_out_settings, mean_loss
from ..inference.model import (
    InferenceSettings,
    OpenedModel,
    base_of,
    dtype_named,
    open_any,
    quiet_transformers,
    raise_problems,
)
from .exported import dtype_of, reload_hidden, write_texts, write_weights
from .location import ModelLocation, find_model
from .merge import (
    ModelComparison,
    cast_parameters,
    compare_hidden,
    has_adapted_head,
    last_hidden,
    merge_adapter,
    sample_ids,
    without_adapter,
)

# Any in this file: plain values for JSON.

_SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B")  # as transformers reads it, and above 0


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `export`.

    Args:
        run: Folder of a run; or an adapter folder, a Hugging Face or LitGPT folder, or a checkpoint.
        to: Folder to write; it must not exist.
        merge: Whether an adapter is merged into its base. False exports an adapter as an adapter.
        checkpoint: Of a run: "last", "best", or a name in `checkpoints/`. None for the newest one.
        dtype: Dtype of the exported parameters. None: as trained; of a merged model that of its base.
        max_shard_size: Largest size of a file with weights, such as "5GB".
        base: Base model of an adapter, if it is not where the adapter was trained.
        data: Data for the loss before and after the merge; None for the held-out data of the run, if it has any.
        max_length: Tokens in a row of `data`.
        micro_batch: Rows that are computed at a time.
        limit: Largest number of batches of these data.
        device: Device for the comparisons; "auto" for the accelerator if there is one.
        trust_remote_code: Whether code in the folder may run.
        allow_download: Whether the base may be the name of a model on the hub.
    """

    run: Path
    to: Path
    merge: bool = False
    checkpoint: str | None = None
    dtype: str | None = None
    max_shard_size: str = "5GB"
    base: Path | None = None
    data: SourceLike | Sequence[SourceLike] | None = None
    max_length: int | None = None
    micro_batch: int = 4
    limit: int | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    allow_download: bool = False

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        problems = replace(self.inference(), dtype=self.dtype).problems()
        target = Path(self.to).expanduser()
        if target.exists():
            problems.append(f"to: Expected a folder that does not exist, got {target}.")
        if not _SIZE.fullmatch(self.max_shard_size.strip().upper()):
            problems.append(f"max_shard_size: Expected a size such as 5GB or 500MB, got {self.max_shard_size!r}.")
        if self.limit is not None and self.limit < 1:
            problems.append(f"limit: Expected at least 1, got {self.limit}.")
        return problems

    def inference(self) -> InferenceSettings:
        """Return how the model is opened."""
        return InferenceSettings(
            self.run,
            checkpoint=self.checkpoint,
            base=self.base,
            quantize="none",
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            allow_download=self.allow_download,
        )


@dataclass(frozen=True)
class MergeLosses:
    """Loss over the same held-out tokens.

    Attributes:
        before: Of the adapter on its unquantized base.
        after: Of the merged model.
        tokens: Number of trained tokens.
        quantized: Of the adapter on its quantized base, as it was trained; None if it was not quantized.
    """

    before: float
    after: float
    tokens: int
    quantized: float | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        to: The folder.
        kind: "adapter", "merged" or "model".
        source: Folder or checkpoint with the weights.
        dtype: Dtype of the weights.
        files: Size of each file.
        reloaded: Largest difference of the last hidden states between the folder, as transformers and peft load it,
            and what was exported.
        effect: The same between the adapter and its base; None without an adapter.
        merged: The same between the merged model and the adapter; None without a merge.
        losses: Held-out losses; None without a merge, or without held-out data.
    """

    to: Path
    kind: str
    source: str
    dtype: str
    files: dict[str, int]
    reloaded: float
    effect: float | None = None
    merged: float | None = None
    losses: MergeLosses | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "to": str(self.to)}

    def describe(self) -> str:
        """Return the report as text."""
        size = sum(self.files.values())
        lines = [
            f"{self.to}: {self.kind}, {self.dtype}, {size / 1e6:.1f} MB in "
            f"{counted(len(self.files), 'file')}, from {self.source}",
            f"loaded again by transformers: hidden states differ by at most {self.reloaded:.2g}",
        ]
        if self.effect is not None:
            lines.append(f"effect of the adapter on hidden states: {self.effect:.2g}")
        if self.merged is not None:
            lines.append(f"merged model and adapter differ by at most {self.merged:.2g}")
            if self.effect is not None and self.merged > self.effect / 2:
                lines.append(f"rounding to {self.dtype} loses much of the adapter: pass dtype=float32 to keep it")
        if self.losses is not None:
            lines += _loss_lines(self.losses)
        elif self.kind == "merged":
            lines.append("no held-out data: pass data=FILE for the loss before and after the merge")
        return "\n".join(lines)


def _loss_lines(losses: MergeLosses) -> list[str]:
    both = f"{losses.before:.6f} before the merge, {losses.after:.6f} after it"
    lines = [f"held-out loss over {counted(losses.tokens, 'token')}: {both}"]
    if losses.quantized is not None:
        lines.append(f"on the quantized base, as trained: {losses.quantized:.6f}")
    return lines


def export_run(run: Path, to: Path, *, merge: bool = False, checkpoint: str | None = None) -> ExportReport:
    """Export the result of a run; called in one process.

    Args:
        run: Folder of the run.
        to: Folder to write; it must not exist.
        merge: Whether an adapter is merged into its base.
        checkpoint: "last", "best" or a name in `checkpoints/`; None for the newest one.
    """
    return export(ExportSettings(run, to, merge=merge, checkpoint=checkpoint or "last"))


def export(settings: ExportSettings) -> ExportReport:
    """Write a folder, load it again with plain transformers and peft, compare, and only then give it its name.

    Raises:
        ConfigError: Settings are invalid, or an adapter's base is missing or another one.
        CheckpointError: A checkpoint is damaged, or what was written differs from what was trained.
    """
    raise_problems(settings.problems())
    to = Path(settings.to).expanduser().absolute()
    with quiet_transformers():
        location = find_model(settings.run, settings.checkpoint)
        if settings.merge and not location.is_adapter:
            raise ConfigError(f"merge: Expected an adapter, got {location.path}.", fix="leave merge out.")
        losses = _Losses(settings, location)
        if settings.merge:
            losses.measure_quantized()
        opened = open_any(settings.inference())
        temporary = temporary_folder(to)
        try:
            report = _write(settings, opened, losses, temporary)
            if to.exists():
                raise ConfigError(f"to: Expected a folder that does not exist, got {to}.", fix="pass another folder.")
            publish(temporary, to)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return replace(report, to=to)


def _write(settings: ExportSettings, opened: OpenedModel, losses: _Losses, folder: Path) -> ExportReport:
    """Write the folder and compare it; of three models, one is in memory at a time."""
    model, location = opened.model, opened.location
    ids = sample_ids(model)
    effect = merged = None
    with_logits = location.is_adapter and has_adapted_head(model)
    if location.is_adapter:
        adapted = last_hidden(model, ids, with_logits=with_logits)
        plain = without_adapter(model, ids, with_logits=with_logits)
        effect = _effect(compare_hidden(adapted, plain), location)
    if settings.merge:
        losses.measure("before", model, opened)
        model = merge_adapter(model, dtype_named(settings.dtype) if settings.dtype else None)
    if settings.dtype is not None:
        cast_parameters(model, dtype_named(settings.dtype))
    reference = last_hidden(model, ids, with_logits=with_logits)
    if settings.merge:
        merged = compare_hidden(reference, adapted)
        losses.measure("after", model, opened)
    kind = "merged" if settings.merge else "adapter" if location.is_adapter else "model"
    dtype = dtype_of(model, is_adapter=kind == "adapter")
    base = base_of(location, settings.inference()) if location.is_adapter else None
    write_weights(model, opened, folder, kind=kind, base=base, max_shard_size=settings.max_shard_size)
    write_texts(opened, folder, kind=kind, base=base, name=Path(settings.to), facts=losses.facts())
    device = opened.device
    opened = model = None  # type: ignore[assignment]  # the memory is needed for the second one
    found = reload_hidden(
        folder,
        ids,
        base=base if kind == "adapter" else None,
        settings=settings.inference(),
        device=device,
        like=reference.dtype,
        with_logits=with_logits,
    )
    reloaded = compare_hidden(found, reference)
    for comparison, shown in ((reloaded, "the folder that was written"), (merged, "the merged model")):
        if comparison is not None and not comparison.is_rounding(dtype_named(dtype)):
            raise CheckpointError(
                f"Expected {shown} to give the hidden states of {location.path}, got a difference of "
                f"{comparison.difference:.3g} where the largest is {comparison.scale:.3g}.",
                fix="report it with the model's config.json; nothing was published.",
            )
    files = {one.name: one.stat().st_size for one in sorted(folder.iterdir()) if one.is_file()}
    return ExportReport(
        folder,
        kind,
        str(location.path),
        dtype,
        files,
        reloaded.difference,
        effect.difference if effect else None,
        merged.difference if merged else None,
        losses.result(),
    )


def _effect(effect: ModelComparison, location: ModelLocation) -> ModelComparison:
    """Return the effect of an adapter.

    Raises:
        ConfigError: It has none.
    """
    if effect.difference == 0:
        raise ConfigError(
            f"Expected an adapter that changes its base, got {location.path}, which does not change a hidden state.",
            fix="train it for at least one step with a learning rate above 0.",
        )
    return effect


class _Losses:
    """Held-out losses of a merge, as far as there are data.

    Args:
        settings: Of the export.
        location: The adapter.
    """

    def __init__(self, settings: ExportSettings, location: ModelLocation) -> None:
        self._settings, self._location = settings, location
        self._is_held_out = settings.data is None
        self._data = self._find() if settings.merge else None
        self._found: dict[str, MeanLoss] = {}

    def measure_quantized(self) -> None:
        """Measure the adapter on the base with which it was trained, if that was quantized."""
        if self._data is None or self._location.quantize is None:
            return
        opened = open_any(replace(self._settings.inference(), quantize="auto"))
        self.measure("quantized", opened.model, opened)

    def measure(self, name: str, model: Any, opened: OpenedModel) -> None:
        """Measure a model's loss."""
        if self._data is None:
            return
        with data_batches(self._data, opened.tokenizer, model, is_held_out=self._is_held_out) as batches:
            self._found[name] = mean_loss(model, batches, limit=self._settings.limit)

    def result(self) -> MergeLosses | None:
        """Return the losses; None without data."""
        if "after" not in self._found:
            return None
        before, after, quantized = (self._found.get(name) for name in ("before", "after", "quantized"))
        assert before is not None
        assert after is not None
        return MergeLosses(before.loss, after.loss, after.tokens, quantized.loss if quantized else None)

    def facts(self) -> list[str]:
        """Return sentences for the model card."""
        losses = self.result()
        return [f"{line[0].upper()}{line[1:]}." for line in _loss_lines(losses)] if losses else []

    def _find(self) -> DataSettings | None:
        trained = self._location.trained
        if self._settings.data is None:
            run = self._location.run
            return held_out_settings(run, self._location.settings) if run is not None else None
        return DataSettings(
            self._settings.data,
            prompt_style=trained.get("prompt_style"),
            max_length=self._settings.max_length or trained.get("max_length") or 2048,
            packing=False,
            group_by_length=True,
            micro_batch=self._settings.micro_batch,
        )
