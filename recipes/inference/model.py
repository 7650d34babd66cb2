"""Opening a trained model: a Hugging Face or LitGPT folder, an adapter, a run, or a checkpoint of any strategy.

Weights are read as tensors and plain values only; nothing in a file is executed.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ... import checkpoint as checkpoints
from ...checkpoint.tensors import AnyTensor, is_tensor, read_tensor
from ...errors import CheckpointError, ConfigError, MissingDependency, nearest
from ..exporting.location import ModelLocation, find_model
from ..model.fingerprint import fingerprint_problems
from ..model.imports import import_peft
from ..model.loading import LoraSettings, ModelSettings, open_model, open_tokenizer, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any in this file: models of transformers and peft, and settings from files.

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_QUANTIZE = ("auto", "none", "nf4")
_PREFIX = "model."  # of RecipeModule's state


@dataclass(frozen=True)
class InferenceSettings:
    """Which model, and how it is opened.

    Args:
        model: Hugging Face folder, LitGPT folder, adapter folder, folder of a run, or a checkpoint.
        checkpoint: Of a run: "last", "best", or a name in `checkpoints/`. None for its result.
        base: Base model of an adapter, if it is not where the adapter was trained.
        tokenizer: Folder of another tokenizer than the model's.
        dtype: Dtype of the parameters, such as "bfloat16"; None as they are stored.
        quantize: Quantization of an adapter's base: "nf4", "none", or "auto" as in training.
        device: Device such as "cuda:1" or "cpu"; "auto" for the accelerator if there is one.
        trust_remote_code: Whether code in the folder may run.
        allow_download: Whether `model` and `base` may be names of models on the hub.
    """

    model: Path
    checkpoint: str | None = None
    base: Path | None = None
    tokenizer: Path | None = None
    dtype: str | None = None
    quantize: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    allow_download: bool = False

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        problems = []
        if self.dtype is not None and self.dtype not in _DTYPES:
            problems.append(f"dtype: Expected one of {', '.join(_DTYPES)}, got {self.dtype!r}.")
        if self.quantize not in _QUANTIZE:
            known = ", ".join(_QUANTIZE)
            hint = nearest(self.quantize, _QUANTIZE)
            problems.append(f"quantize: Expected one of {known}, got {self.quantize!r}{hint}.")
        return [*problems, *_device_problems(self.device)]


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready for inference.

    Attributes:
        model: Model of transformers, or a PeftModel, in evaluation mode.
        tokenizer: Its tokenizer.
        location: Where it is from.
        quantize: Quantization of the base, None for none.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    location: ModelLocation
    quantize: str | None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = next(iter(self.model.parameters())).device
        return device


def open_any(settings: InferenceSettings) -> OpenedModel:
    """Open a model with its tokenizer.

    Raises:
        ConfigError: Settings are invalid, there is no model, or an adapter's base is missing or another one.
        CheckpointError: A checkpoint is damaged.
        MissingDependency: transformers or peft is not installed.
    """
    raise_problems(settings.problems())
    location = find_model(settings.model, settings.checkpoint, allow_download=settings.allow_download)
    quantize = location.quantize if settings.quantize == "auto" else settings.quantize
    quantize = None if quantize == "none" else quantize
    tokenizer = open_tokenizer(
        settings.tokenizer or location.tokenizer,
        trust_remote_code=settings.trust_remote_code,
        allow_download=settings.allow_download,
    )
    model = open_weights(location, settings, quantize=quantize)
    return OpenedModel(model.to(device_named(settings.device)), tokenizer, location, quantize)


def open_weights(location: ModelLocation, settings: InferenceSettings, *, quantize: str | None = None) -> Any:
    """Return the model with its weights, on the CPU, in evaluation mode.

    Args:
        location: Where it is.
        settings: Base, dtype, and what is permitted.
        quantize: Quantization of an adapter's base.
    """
    if location.kind == "checkpoint":
        model = _from_checkpoint(location, settings, quantize)
    elif location.kind == "adapter":
        model = _with_adapter(location, settings, quantize)
    else:
        model = open_base(location.path, settings, quantize=quantize)
    model.requires_grad_(False)
    return model.eval()


def base_of(location: ModelLocation, settings: InferenceSettings) -> Path:
    """Return the folder of an adapter's base, which is the one that it was trained on.

    Raises:
        ConfigError: It is missing, or another one; names what differs.
    """
    base = Path(settings.base).expanduser() if settings.base is not None else location.recorded_base()
    if base is None or not (base.exists() or settings.allow_download):
        raise ConfigError(
            f"base: Expected the base model of the adapter {location.path}, got {base}, which does not exist.",
            fix="pass base=FOLDER with the model that the adapter was trained on.",
        )
    stored = location.recipe.get("fingerprint")
    problems = fingerprint_problems(stored, base) if stored and base.exists() else []
    if problems:
        raise _another_base(location, base, problems)
    return base


def open_base(folder: Path, settings: InferenceSettings, *, quantize: str | None = None) -> Any:
    """Return the model of a Hugging Face folder."""
    options = ModelSettings(
        folder, quantize=quantize, trust_remote_code=settings.trust_remote_code, allow_download=settings.allow_download
    )
    dtype = settings.dtype or stored_dtype(options)
    return open_model(dataclasses.replace(options, dtype=dtype))


def stored_dtype(settings: ModelSettings) -> str:
    """Return the name of the dtype in which a folder's weights are stored."""
    dtype = getattr(read_config(settings), "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name that `InferenceSettings.problems` accepts."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_named(name: str) -> torch.device:
    """Return a device; of "auto" the accelerator if there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _device_problems(name: str) -> Iterator[str]:
    try:
        device = device_named(name)
    except (RuntimeError, ValueError) as error:
        yield f"device: Expected a device of torch or 'auto', got {name!r} ({error})."
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None and found.type == device.type else 0
    if device.type != "cpu" and (device.index or 0) >= count:
        kinds = ["auto", "cpu", *([found.type] if found is not None else [])]
        yield f"device: Expected a device of this machine ({', '.join(kinds)}), got {name!r}."


def num_positions(model: Any) -> int | None:
    """Return the length of the model's context; None if its configuration does not have one."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def num_embeddings(model: Any) -> int:
    """Return the number of rows of the embedding, also of one with an adapter."""
    return int(model.get_input_embeddings().weight.shape[0])


def raise_problems(problems: list[str]) -> None:
    """Raise one error with all problems, if there are any."""
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"Expected valid settings, got problems:{listed}", fix="correct the settings that are named.")


def _with_adapter(location: ModelLocation, settings: InferenceSettings, quantize: str | None) -> Any:
    base = base_of(location, settings)
    peft = import_peft(f"the adapter {location.path}")
    model = open_base(base, settings, quantize=quantize)
    stored = _adapter_names(location.path)
    try:
        adapted: Any = peft.PeftModel.from_pretrained(model, str(location.path))
    except (RuntimeError, ValueError) as error:  # other shapes, or no module that its names match
        raise _another_base(location, base, [str(error).strip()]) from error
    if stored is not None:
        own = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        problems = [f"Expected no weight {name}, got one in the adapter." for name in sorted(stored - own)[:3]]
        problems += [f"Expected the weight {name} in the adapter, got none." for name in sorted(own - stored)[:3]]
        if problems:
            raise _another_base(location, base, problems)
    return adapted


def _adapter_names(folder: Path) -> set[str] | None:
    """Return the names in the adapter's file; None if it is not safetensors."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as opened:
        return set(opened.keys())


def _another_base(location: ModelLocation, base: Path, problems: list[str]) -> ConfigError:
    listed = "".join(f"\n  {problem}" for problem in problems)
    trained_on = location.recorded_base()
    return ConfigError(
        f"base: Expected the model that the adapter {location.path} was trained on ({trained_on}), got {base}, which "
        f"differs:{listed}",
        fix="pass base=FOLDER with that model, unchanged; an adapter has no meaning on another one.",
    )


def _from_checkpoint(location: ModelLocation, settings: InferenceSettings, quantize: str | None) -> Any:
    options = _trained_settings(location.model_settings)
    state = checkpoints.load(location.path, lazy=True)["state_dict"]
    named = {name.removeprefix(_PREFIX): value for name, value in state.items() if is_tensor(value)}
    if options.lora is not None:
        base = base_of(location, settings)
        options = dataclasses.replace(
            options,
            model=base,
            quantize=quantize,
            gradient_checkpointing=False,
            trust_remote_code=settings.trust_remote_code,
            allow_download=settings.allow_download,
        )
        options = dataclasses.replace(options, dtype=settings.dtype or stored_dtype(options))
        return _fill(open_model(options), named, location.path)
    options = dataclasses.replace(
        options,
        model=_config_folder(location, settings, options),
        trust_remote_code=settings.trust_remote_code,
        allow_download=settings.allow_download,
    )
    model = _empty(options, settings.dtype or _common_dtype(named))
    return _fill(model, named, location.path)


def _trained_settings(values: Mapping[str, Any]) -> ModelSettings:
    """Return the settings that a checkpoint stores as plain values."""
    known = {one.name for one in dataclasses.fields(ModelSettings)}
    kept = {name: value for name, value in values.items() if name in known}
    lora = kept.pop("lora", None)
    settings = ModelSettings(**{**kept, "model": Path(str(kept["model"]))})
    return dataclasses.replace(settings, lora=LoraSettings(**lora) if lora else None)


def _config_folder(location: ModelLocation, settings: InferenceSettings, options: ModelSettings) -> Path:
    """Return where the configuration of a fully trained model is: given, in the run, or where training found it."""
    if settings.base is not None:
        return Path(settings.base).expanduser()
    run = location.run
    exported = run / "model" if run is not None else None
    if not options.model.exists() and exported is not None and (exported / "config.json").is_file():
        return exported
    if not options.model.exists() and not settings.allow_download:
        raise ConfigError(
            f"base: Expected the model that the checkpoint {location.path} was trained from, got {options.model}, "
            "which does not exist.",
            fix="pass base=FOLDER with its config.json.",
        )
    return options.model


def _common_dtype(state: Mapping[str, AnyTensor]) -> str:
    """Return the dtype of most parameters."""
    counts: dict[torch.dtype, int] = {}
    for tensor in state.values():
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.shape.numel()
    return str(max(counts, key=lambda dtype: counts[dtype], default=torch.float32)).removeprefix("torch.")


def _empty(settings: ModelSettings, dtype: str) -> Any:
    """Return the model of a configuration, whose parameters have no values yet; its buffers have."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = read_config(settings)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype_named(dtype), trust_remote_code=settings.trust_remote_code
        )
    model.config.use_cache = False
    return model


def _fill(model: nn.Module, state: Mapping[str, AnyTensor], source: Path) -> nn.Module:
    """Copy stored values into a model, one tensor in memory at a time.

    Raises:
        CheckpointError: Names or shapes do not match; lists all.
    """
    own = model.state_dict(keep_vars=True)
    problems = [f"unexpected {name}" for name in state if name not in own]
    filled: dict[int, tuple[str, Tensor]] = {}
    for name, stored in state.items():
        target = own.get(name)
        if target is None:
            continue
        if target.shape != stored.shape:
            problems.append(f"{name} has the shape {list(stored.shape)} instead of {list(target.shape)}")
            continue
        value = read_tensor(stored).to(target.dtype)
        first = filled.setdefault(id(target), (name, target))[0]
        if first != name and not torch.equal(target.detach().cpu(), value):
            problems.append(f"{first} and {name} are one tensor in the model, with two values in the checkpoint")
        with torch.no_grad():
            target.copy_(value)
    is_adapted = hasattr(model, "peft_config")
    problems += [
        f"missing {name}"
        for name, target in own.items()
        if id(target) not in filled and (not is_adapted or _is_trained(name))
    ]
    if problems:
        raise CheckpointError(
            f"Expected a checkpoint that matches {type(model).__name__}, got {source} with problems:\n  "
            + "\n  ".join(problems),
            fix="pass base=FOLDER with the model that it was trained from.",
        )
    return model


def _is_trained(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and notes of transformers for as long as it lasts.

    Raises:
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependency("transformers", needed_for="a recipe", extra="recipes") from error
    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # peft 0.21 with transformers 5.23
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated")
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match any targeted module")
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
