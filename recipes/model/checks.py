"""What is wrong with the settings of a model, found without reading weights."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from packaging.version import Version

from ...errors import ConfigError, MissingDependency, nearest
from ...precision.float8 import quiet_torchao
from ..loss import find_router_loss
from .adapters import add_adapters
from .fingerprint import check_weight_files
from .litgpt import config_file, read_litgpt_config
from .settings import CONFIGS, DTYPES, QUANTIZATIONS, LoraSettings, ModelSettings, shipped_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Any in this file: JSON.

_BITSANDBYTES = "0.50"


def model_problems(settings: ModelSettings) -> list[str]:
    """Return everything that is wrong with the settings, as `name: Expected ..., got ...`; reads no weights.

    Raises:
        MissingDependency: transformers or peft is not installed.
    """
    problems = [*_plain_problems(settings), *_quantize_problems(settings)]
    found = list(_path_problems(settings))
    if found:
        return [*found, *problems]
    try:
        model = skeleton(settings)
    except ConfigError as error:
        return [error.what, *problems]
    if (coef := settings.router_aux_loss_coef) and find_router_loss(model) is None:
        problems.append(
            f"router_aux_loss_coef: Expected a model with experts whose code has load_balancing_loss_func, got {coef} "
            f"for {type(model).__name__}."
        )
    if settings.lora is not None and not problems:
        problems += _target_problems(model, settings.lora)
    return problems


def read_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the configuration of the model.

    Raises:
        ConfigError: There is none, or none that transformers reads.
        MissingDependency: transformers is not installed.
    """
    quiet_torchao()  # which transformers imports
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependency("transformers", needed_for="a recipe", extra="recipes") from error
    problems = list(_path_problems(settings))
    if problems:
        raise ConfigError("\n".join(problems), fix="pass a Hugging Face folder or a LitGPT folder as model=.")
    litgpt = config_file(settings.path)
    if litgpt is not None:
        return read_litgpt_config(litgpt)
    try:
        return cast(
            "PretrainedConfig",
            AutoConfig.from_pretrained(
                settings.location,
                trust_remote_code=settings.trust_remote_code,
                local_files_only=not settings.allow_download,
            ),
        )
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(settings, error) from error


def skeleton(settings: ModelSettings) -> PreTrainedModel:
    """Return the model without values, on the meta device and without adapters: for names and sizes.

    Raises:
        ConfigError: There is no configuration of a causal language model.
        MissingDependency: transformers is not installed.
    """
    config = read_config(settings)
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError, ImportError) as error:
        raise unreadable(settings, error) from error
    return cast("PreTrainedModel", model)


def unreadable(settings: ModelSettings, error: Exception) -> ConfigError:
    """Return the error for what transformers cannot read."""
    first = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"model: Expected the configuration of a causal language model, got {settings.model} ({first}).",
        fix="pass a folder of a model that this version of transformers knows.",
    )


def _path_problems(settings: ModelSettings) -> Iterator[str]:
    path = settings.path
    if not path.exists():
        if not settings.allow_download:
            near = nearest(str(settings.model), shipped_names())
            yield f"model: Expected an existing path, got {settings.model}{near}; allow_download is false."
        return
    litgpt = config_file(path)
    config = litgpt or (path if path.is_file() else path / "config.json")
    reads_weights = settings.needs_weights and not settings.from_scratch
    bare = f"the name {settings.model}, a configuration" if path.parent == CONFIGS else f"the file {path}"
    if reads_weights and (path.parent == CONFIGS or path.is_file()):
        yield f"model: Expected a folder with weights, got {bare} without weights; pass a folder that has them."
    elif not config.is_file():
        yield f"model: Expected a folder with config.json, got {path}{_instead(path)}."
    else:
        if litgpt is None:
            yield from _config_problems(settings, config)
        if reads_weights:
            try:
                check_weight_files(path)
            except ConfigError as error:
                yield f"model: {error.what}"


def _instead(path: Path) -> str:
    """Return what a folder without a configuration is, where that is known."""
    if (path / "adapter_config.json").is_file():
        try:
            base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        except (ValueError, AttributeError):
            base = None
        return (
            f", an adapter{f' of {base}' if base else ''}; pass its base, or merge it with `loopwright recipe export`"
        )
    if (path / "recipe.yaml").is_file():
        return ", the folder of a run; pass its subfolder model, if it holds an entire model"
    return ""


def _config_problems(settings: ModelSettings, config: Path) -> Iterator[str]:
    try:
        content: Any = json.loads(config.read_text())
    except ValueError as error:
        yield f"model: Expected JSON in {config}, got {error}."
        return
    if not isinstance(content, dict):
        yield f"model: Expected a mapping in {config}, got {type(content).__name__}."
    elif "auto_map" in content and not settings.trust_remote_code:
        yield f"trust_remote_code: Expected true for {settings.model}, whose model is code in its folder, got false."
    elif "quantization_config" in content:
        method = content["quantization_config"].get("quant_method", "an unknown method")
        yield f"model: Expected weights that are not quantized, got {method} in {config}; quantize=nf4 does it here."


def _plain_problems(settings: ModelSettings) -> Iterator[str]:
    if settings.dtype is not None and settings.dtype not in DTYPES:
        yield f"dtype: Expected one of {', '.join(DTYPES)}, got {settings.dtype!r}{nearest(settings.dtype, DTYPES)}."
    coef = settings.router_aux_loss_coef
    if coef is not None and not 0 <= coef < math.inf:
        yield f"router_aux_loss_coef: Expected at least 0, got {coef}."
    lora = settings.lora
    if lora is None:
        return
    if settings.from_scratch:
        yield "lora: Expected none with from_scratch, whose base would never be trained, got adapters."
    if lora.r < 1:
        yield f"lora.r: Expected at least 1, got {lora.r}."
    if not lora.alpha > 0:
        yield f"lora.alpha: Expected more than 0, got {lora.alpha}."
    if not 0 <= lora.dropout < 1:
        yield f"lora.dropout: Expected a share in [0, 1), got {lora.dropout}."
    if not lora.targets:
        yield "lora.targets: Expected names of layers, got none."
    if importlib.util.find_spec("peft") is None:
        yield "lora: Expected the package peft, got none; pip install 'loopwright[recipes]'."


def _quantize_problems(settings: ModelSettings) -> Iterator[str]:
    if settings.quantize is None:
        return
    if settings.quantize not in QUANTIZATIONS:
        yield f"quantize: Expected one of {', '.join(QUANTIZATIONS)}, got {settings.quantize!r}."
        return
    if settings.lora is None:
        yield "quantize: Expected lora beside it, because weights of 4 bits cannot be trained, got none."
    if settings.from_scratch:
        yield "quantize: Expected a folder with weights, got from_scratch."
    if settings.dtype == "float64":
        yield "dtype: Expected float32, bfloat16 or float16 with quantize, got float64."
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        yield "quantize: Expected the package bitsandbytes, got none; pip install 'loopwright[qlora]'."
        return
    if Version(found) < Version(_BITSANDBYTES):
        yield f"quantize: Expected bitsandbytes {_BITSANDBYTES} or later, got {found}."


def _target_problems(model: PreTrainedModel, lora: LoraSettings) -> Iterator[str]:
    """Find names without a layer, and what peft refuses, on a model without values."""
    names = [name for name, _ in model.named_modules() if name]
    ends = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    targets = [] if isinstance(lora.targets, str) else list(lora.targets)
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            yield f"lora.targets: Expected names of layers, got {target!r}{nearest(target, ends)}."
            return
    try:
        add_adapters(model, lora, has_values=False)
    except ConfigError as error:
        yield error.what
