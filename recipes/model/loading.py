"""The model of a recipe: a Hugging Face folder or a configuration, with LoRA and quantization if asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from ...errors import ConfigError, MissingDependency
from ...precision.quantized import import_bitsandbytes
from .adapters import add_adapters
from .checks import model_problems, read_config, skeleton, unreadable
from .litgpt import config_file, read_litgpt_weights
from .settings import LoraSettings, ModelSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "LoraSettings",
    "ModelSettings",
    "meta_model",
    "model_problems",
    "open_model",
    "open_tokenizer",
    "read_config",
    "settings_as_dict",
    "skeleton",
]

# Any in this file: arguments of transformers and peft.


def open_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, allow_download: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder.

    Args:
        folder: Hugging Face folder; with `allow_download`, also the name of a tokenizer on the hub.
        trust_remote_code: Whether code in the folder may run.
        allow_download: Whether files may be downloaded.

    Raises:
        ConfigError: There is none.
        MissingDependency: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependency("transformers", needed_for="a recipe", extra="recipes") from error
    path = Path(folder).expanduser()
    if not path.is_dir() and not allow_download:
        raise ConfigError(
            f"tokenizer: Expected a folder with a tokenizer, got {folder}.",
            fix="pass the folder of a tokenizer, or allow_download=true for a name on the hub.",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path if path.is_dir() else folder),
            trust_remote_code=trust_remote_code,
            local_files_only=not allow_download,
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"tokenizer: Expected a folder with a tokenizer, got {folder} ({first}).",
            fix="pass the folder of a tokenizer (tokenizer=...), or train one with `loopwright recipe tokenizer`.",
        ) from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def open_model(settings: ModelSettings) -> nn.Module:
    """Return the model with its weights, a PeftModel with LoRA, in training mode; it uses no cache.

    Random initial values depend on `seed` only, and the generator is left as it was.

    Raises:
        ConfigError: The settings have problems, or weights are missing in the folder.
        MissingDependency: A package is not installed.
    """
    config = read_config(settings)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            model = _from_config(config, settings) if settings.from_scratch else _from_folder(config, settings)
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise unreadable(settings, error) from error
        model.config.use_cache = False
        if settings.gradient_checkpointing:
            _checkpoint_activations(model)
        adapted = model if settings.lora is None else add_adapters(model, settings.lora)
        return adapted.train()  # a folder opens in evaluation, in which blocks are not computed twice


def _from_config(config: PretrainedConfig, settings: ModelSettings) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings.dtype or "float32")
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code, dtype=dtype)
    return cast("PreTrainedModel", model)


def _from_folder(config: PretrainedConfig, settings: ModelSettings) -> PreTrainedModel:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    dtype = base_dtype(config, settings)
    options: dict[str, Any] = {"config": config, "dtype": dtype, **_quantization(settings, dtype)}
    if config_file(settings.path) is not None:
        made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        state = read_litgpt_weights(settings.path)
        loaded: Any = made.from_pretrained(None, state_dict=state, output_loading_info=True, **options)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(
            settings.location,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=not settings.allow_download,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    lost = sorted([*info["missing_keys"], *(str(one) for one in info["mismatched_keys"])])
    if lost:
        raise ConfigError(
            f"model: Expected the weights of all layers in {settings.location}, got none for {', '.join(lost[:3])}"
            f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}.",
            fix="pass a complete folder, or from_scratch=true to begin with random values.",
        )
    if settings.quantize is not None:
        _keep_scales(model)
    return cast("PreTrainedModel", model)


def meta_model(settings: ModelSettings) -> nn.Module:
    """Return the model with its adapters on the meta device, which takes no memory: for names, sizes and counts.

    Raises:
        ConfigError: There is no configuration of a causal language model, or no layer for adapters.
        MissingDependency: A package is not installed.
    """
    model = skeleton(settings)
    if settings.gradient_checkpointing:
        _checkpoint_activations(model)
    return model if settings.lora is None else add_adapters(model, settings.lora, has_values=False)


def _checkpoint_activations(model: Any) -> None:
    """Let a model of transformers compute the activations of its blocks again in the backward pass."""
    # The other form of torch needs inputs with gradients, which a frozen embedding does not give.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def base_dtype(config: PretrainedConfig, settings: ModelSettings) -> torch.dtype:
    """Return the dtype of the parameters, by `dtype` and the folder."""
    if settings.dtype is not None:
        return cast(torch.dtype, getattr(torch, settings.dtype))
    if settings.lora is None:
        return torch.float32
    dtype = config.get_text_config().dtype or config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _quantization(settings: ModelSettings, dtype: torch.dtype) -> dict[str, Any]:
    if settings.quantize is None:
        return {}
    import_bitsandbytes()
    from transformers import BitsAndBytesConfig

    # Packed weights look like parameters of the computing dtype: shards of fsdp need one dtype for all.
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=settings.quantize,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
        )
    }


def _keep_scales(model: nn.Module) -> None:
    """Let evaluation leave quantized weights as they are.

    On processors with AVX512-BF16, bitsandbytes packs the weights again in the first evaluation. This rounds their
    scales to bfloat16 permanently, so that training after a validation would continue with other weights, and it fails
    for layers whose width is not a multiple of its blocks.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # nn.Module has no types for attributes


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the progress bars of transformers, which each rank would draw."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def settings_as_dict(settings: ModelSettings) -> dict[str, Any]:
    """Return the settings as plain values, for a checkpoint."""
    return cast("dict[str, Any]", json.loads(json.dumps(asdict(settings), default=str)))
