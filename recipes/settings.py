"""`FinetuneSettings` and `PretrainSettings`: the settings of a training, flat, with all checks that need no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import nearest
from ..strategies.constructors import inherit_descriptions
from .class_node import class_node
from .data.named import named_data
from .data.settings import DataSettings, SourceLike
from .model.loading import LoraSettings, ModelSettings
from .module import OptimizerSettings

# Any in this file: arguments of classes that the user names, and values of YAML.

METHODS = ("lora", "full")
RESUMES = ("auto", "force")
_LENGTHS = ("epochs", "steps", "tokens")
# Arguments of the Trainer that follow from a setting, which is to be used instead.
OWNED = {
    "accumulate_grad_batches": "global_batch and micro_batch",
    "global_batch_size": "global_batch",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "max_tokens": "tokens",
    "max_samples": "steps",
    "strategy": "strategy",
    "devices": "devices",
    "precision": "precision",
    "use_distributed_sampler": "global_batch",
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings(DataSettings):
    """Settings of a training.

    Args:
        model: Hugging Face folder, or a folder that LitGPT wrote.
        out: Folder of the run. The same settings again continue the run in it.
        tokenizer: Folder of the tokenizer; None for that of the model.
        epochs: Times that the data are read; 1 if none of epochs, steps and tokens is given.
        steps: Optimizer steps.
        tokens: Tokens to read, without padding; rounded up to full optimizer steps.
        global_batch: Rows per optimizer step over all ranks; "auto" is micro_batch x ranks, and in a resumed run the
            number that the run began with.
        learning_rate: Largest learning rate; None is 2e-4 for LoRA, 2e-5 for full finetuning, 3e-4 for pretraining.
        weight_decay: Weight decay of matrices; vectors have none.
        betas: Of AdamW.
        eps: Of AdamW.
        warmup: Steps in which the learning rate increases, as a whole number, or their share of the steps, as in 0.03.
        schedule: Learning rate after the warm-up: "cosine", "linear", "polynomial", "constant" or "wsd" (constant, and
            a decay in the last tenth); for their arguments use lr_scheduler=wsd lr_scheduler.decay=0.2.
        min_lr: Last learning rate, as a share of the largest.
        scale_lr: Whether learning rates are multiplied by the number of data ranks: for rates that were chosen for one
            device, while each device adds rows to the global batch.
        optimizer: Another optimizer, by name or path; its arguments are optimizer.NAME. Muon trains the matrices, and
            AdamW the embeddings, the head and vectors.
        lr_scheduler: Another schedule, stepped after each optimizer step; its arguments are lr_scheduler.NAME.
        groups: Optimizers of kinds of parameters (matrices, vectors, embeddings, head, stacks), as in
            groups.matrices.optimizer=Muon groups.matrices.learning_rate=0.02. Each has optimizer, learning_rate,
            weight_decay, and arguments of the optimizer; what is not given is that of the other settings.
        strategy: Strategy of the Trainer, such as "ddp", "fsdp", "deepspeed_stage_3" or "mesh:fsdp=2,tp=2".
        devices: Number of devices, a list of indices, or "auto".
        precision: Precision of the Trainer, such as "bf16-mixed"; None for 32 bits.
        dtype: Type of the parameters, such as "bfloat16"; None: float32 if trained, else that of the folder.
        gradient_checkpointing: Whether blocks are computed again in the backward pass, to save memory.
        router_aux_loss_coef: Factor of the loss by which a model with experts uses all of them, in addition to the
            cross entropy; None for what its config.json asks for, 0 for the cross entropy alone.
        chunk_tokens: Tokens whose logits exist at once; None chooses by the vocabulary, 0 computes all at once.
        verify_packing: Whether the first batch shows that packed samples do not influence each other.
        val_every: Optimizer steps between validations; None: at the end of each epoch.
        save_every: Optimizer steps between checkpoints; None: every 15 minutes. The end is always saved.
        trainer: Further arguments of the Trainer.
        resume: "auto" continues the run in `out` if the settings that change its training are equal; "force" also
            with others.
        trust_remote_code: Whether code in the model's folder may run.
        allow_download: Whether a model that is not a folder, and data sets by name (alpaca, alpaca2k, tinystories,
            slimpajama, redpajama), may be downloaded from the hub.
    """

    model: Path = field(metadata={"is_folder": True})
    out: Path = field(metadata={"is_folder": True})
    tokenizer: Path | None = field(default=None, metadata={"is_folder": True})
    epochs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    global_batch: int | str = "auto"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: int | float = 0.03
    schedule: str = "cosine"
    min_lr: float = 0.0
    scale_lr: bool = False
    optimizer: str | dict[str, Any] | None = None
    lr_scheduler: str | dict[str, Any] | None = None
    groups: dict[str, Any] = field(default_factory=dict)
    strategy: str | dict[str, Any] = "auto"
    devices: int | str | list[int] = "auto"
    precision: int | str | None = None
    dtype: str | None = None
    gradient_checkpointing: bool = False
    router_aux_loss_coef: float | None = None
    chunk_tokens: int | None = None
    verify_packing: bool = True
    val_every: int | None = None
    save_every: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    resume: str = "auto"
    trust_remote_code: bool = False
    allow_download: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "out", "tokenizer", "cache"):  # Python programs may pass text
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))

    @property
    def has_val(self) -> bool:
        """Whether there are held-out data."""
        return self.val_data is not None or self.val_fraction > 0

    @property
    def default_learning_rate(self) -> float:
        """Learning rate where none is given."""
        return 3e-4

    def data_settings(self) -> DataSettings:
        """Return the settings of the data."""
        return DataSettings(**{one.name: getattr(self, one.name) for one in fields(DataSettings)})

    def model_settings(self) -> ModelSettings:
        """Return the settings of the model."""
        return ModelSettings(
            model=self.model,
            dtype=self.dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            router_aux_loss_coef=self.router_aux_loss_coef,
            trust_remote_code=self.trust_remote_code,
            allow_download=self.allow_download,
            seed=self.seed,
        )

    def optimizer_settings(self) -> OptimizerSettings:
        """Return the settings of optimizer and schedule."""
        names = ("weight_decay", "betas", "eps", "warmup", "schedule", "min_lr", "scale_lr")
        rate = self.default_learning_rate if self.learning_rate is None else self.learning_rate
        return OptimizerSettings(
            learning_rate=rate,
            optimizer=class_node("optimizer", self.optimizer)[0],
            lr_scheduler=class_node("lr_scheduler", self.lr_scheduler)[0],
            groups={kind: _with_class(kind, options) for kind, options in self.groups.items()},
            **{name: getattr(self, name) for name in names},
        )

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`; no file is read."""
        return [*super().problems(), *self._training_problems()]

    def _training_problems(self) -> Iterator[str]:
        given = [name for name in _LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            yield f"{given[1]}: Expected one of {', '.join(_LENGTHS)}, got {' and '.join(given)}."
        for name in (*_LENGTHS, "val_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}: Expected at least 1, got {value}."
        if self.val_every is not None and not self.has_val:
            yield "val_every: Expected val_data or val_fraction beside it, got neither."
        if self.global_batch != "auto" and (not isinstance(self.global_batch, int) or self.global_batch < 1):
            yield f"global_batch: Expected auto or a number of at least 1, got {self.global_batch!r}."
        if not self.allow_download:
            for name, hub in {**named_data(self.data), **named_data(self.val_data)}.items():
                yield f"data: Expected a path, got the name {name} of {hub.repository}; allow_download is false."
        if self.resume not in RESUMES:
            yield f"resume: Expected one of {', '.join(RESUMES)}, got {self.resume!r}{nearest(self.resume, RESUMES)}."
        if self.chunk_tokens is not None and self.chunk_tokens < 0:
            yield f"chunk_tokens: Expected at least 0, got {self.chunk_tokens}."
        for name in self.trainer:
            if name in OWNED:
                yield f"trainer.{name}: Expected the setting {OWNED[name]} instead, got trainer.{name}."
        for name in ("optimizer", "lr_scheduler"):
            yield from class_node(name, getattr(self, name))[1]
        for kind, options in self.groups.items():
            if isinstance(options, Mapping) and "optimizer" in options:
                yield from class_node(f"groups.{kind}.optimizer", options["optimizer"])[1]
        yield from self.optimizer_settings().problems()


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TrainSettings):
    """Settings of `finetune`.

    Args:
        method: "lora" trains adapters, "full" all parameters.
        lora: Settings of the adapters.
        quantize: "nf4" holds the frozen base in 4 bits (QLoRA); None for no quantization.
    """

    method: str = "lora"
    lora: LoraSettings = field(default_factory=LoraSettings)
    quantize: str | None = None

    @property
    def default_learning_rate(self) -> float:
        """Learning rate where none is given."""
        return 2e-4 if self.method == "lora" else 2e-5

    def model_settings(self) -> ModelSettings:
        """Return the settings of the model."""
        lora = self.lora if self.method == "lora" else None
        return ModelSettings(**{**_shallow(super().model_settings()), "lora": lora, "quantize": self.quantize})

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`; no file is read."""
        return [*super().problems(), *self._method_problems()]

    def _method_problems(self) -> Iterator[str]:
        if self.method not in METHODS:
            yield f"method: Expected one of {', '.join(METHODS)}, got {self.method!r}{nearest(self.method, METHODS)}."
        if self.method == "full" and self.quantize is not None:
            yield f"quantize: Expected method=lora beside it, got method=full and quantize={self.quantize}."
        if self.method == "full" and self.lora != LoraSettings():
            yield "lora: Expected method=lora beside its settings, got method=full."


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(TrainSettings):
    """Settings of `pretrain`.

    Args:
        model: config.json or a folder with one, or a model_config.yaml of LitGPT; `seed` draws the initial values.
        from_scratch: Whether initial values are random; false continues with the weights in the folder.
        weight_decay: Weight decay of matrices; vectors have none.
        betas: Of AdamW.
    """

    from_scratch: bool = True
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    min_lr: float = 0.1

    def model_settings(self) -> ModelSettings:
        """Return the settings of the model."""
        return ModelSettings(**{**_shallow(super().model_settings()), "from_scratch": self.from_scratch})


@dataclass(frozen=True, kw_only=True)
class PlanFinetuneSettings(FinetuneSettings):
    """Settings of `plan`: those of `finetune`; `data` and `out` may be left out.

    Args:
        data: Files or folders; without them, memory and work are computed from the model's configuration alone.
        out: Folder of the run that is planned.
    """

    data: SourceLike | Sequence[SourceLike] = ()
    out: Path = field(default=Path("runs/planned"), metadata={"is_folder": True})

    def model_settings(self) -> ModelSettings:
        """Return the settings of the model; without data, its weights are not asked for."""
        return replace(super().model_settings(), needs_weights=bool(self.data))


@dataclass(frozen=True, kw_only=True)
class PlanPretrainSettings(PretrainSettings):
    """Settings of `plan pretrain`: those of `pretrain`; `data` and `out` may be left out.

    Args:
        data: Files or folders; without them, memory and work are computed from the model's configuration alone.
        out: Folder of the run that is planned.
    """

    data: SourceLike | Sequence[SourceLike] = ()
    out: Path = field(default=Path("runs/planned"), metadata={"is_folder": True})

    def model_settings(self) -> ModelSettings:
        """Return the settings of the model; without data, its configuration is enough."""
        return replace(super().model_settings(), needs_weights=bool(self.data))


def plain_settings(settings: TrainSettings) -> dict[str, Any]:
    """Return settings as values that YAML can hold; paths are absolute."""
    found = {one.name: _plain(getattr(settings, one.name)) for one in fields(settings)}
    for name in ("model", "out", "tokenizer", "cache"):
        found[name] = _absolute(found[name])
    for name in ("data", "val_data"):
        found[name] = _absolute_sources(found[name])
    return found


def default_settings(settings: TrainSettings) -> dict[str, Any]:
    """Return the defaults of all settings that have one, as values that YAML can hold."""
    made = [
        (one.name, one.default if one.default_factory is MISSING else one.default_factory()) for one in fields(settings)
    ]
    return {name: _plain(value) for name, value in made if value is not MISSING}


def _with_class(kind: str, options: Any) -> Any:
    """Return the options of a group, with its optimizer in the form of `OptimizerSettings`."""
    if not isinstance(options, Mapping) or "optimizer" not in options:
        return options
    return {**options, "optimizer": class_node(f"groups.{kind}.optimizer", options["optimizer"])[0]}


def _absolute(path: str | None) -> str | None:
    if path is None:
        return None
    here = Path(path).expanduser()
    return str(here.resolve()) if here.exists() or here.is_absolute() else path  # else the name of a model on the hub


def _absolute_sources(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute_sources(one) for one in value]
    if isinstance(value, dict):
        return {**value, "path": _absolute(value.get("path"))}
    return _absolute(value)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, LoraSettings):
        return _plain(asdict(value))
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    # Objects that a program passes in `trainer` have no form in YAML: their type tells them apart.
    return str(value) if isinstance(value, Path) else f"{type(value).__module__}.{type(value).__qualname__}"


def _shallow(settings: ModelSettings) -> dict[str, Any]:
    return {one.name: getattr(settings, one.name) for one in fields(settings)}


for _cls in (TrainSettings, FinetuneSettings, PretrainSettings, PlanFinetuneSettings, PlanPretrainSettings):
    inherit_descriptions(_cls)
