"""Folders of small models with tokenizers, adapters and runs, for the tests of what comes after training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from recipe_models import quiet, save_model, settings, trainer
from recipe_texts import CHATML, chat, small_tokenizer, write_jsonl
from torch.utils.data import DataLoader

from loopwright.recipes.data import DataSettings, RecipeData
from loopwright.recipes.inference.model import quiet_transformers
from loopwright.recipes.model.settings import LoraSettings, ModelSettings
from loopwright.recipes.module import OptimizerSettings, RecipeModule

# Any in this file: transformers, which has no types here.

TOKENIZER = 400


def model_folder(folder: Path, family: str = "llama", *, template: str | None = CHATML, **changes: Any) -> Path:
    """Save a model with a tokenizer of its vocabulary, and return the folder."""
    tokens = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}
    save_model(folder, family, **{"vocab_size": TOKENIZER, **tokens, **changes})
    small_tokenizer(template).save_pretrained(folder)
    return folder


def open_plain(folder: Path, **options: Any) -> Any:
    """Return a model as anyone would load it."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **options}).eval()


def adapter_folder(folder: Path, base: Path, *, seed: int = 7, **options: Any) -> Path:
    """Save an adapter of peft with random weights, which has an effect, and return the folder."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        chosen = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
        model = get_peft_model(open_plain(base), LoraConfig(**chosen))
        with torch.no_grad():
            for name, one in model.named_parameters():
                if one.requires_grad:
                    one.add_(torch.randn(one.shape).to(one) * (0.02 if "magnitude" in name else 0.1))
        model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def open_adapter(base: Path, adapter: Path, **options: Any) -> Any:
    """Return an adapter on its base, as anyone would load it."""
    from peft import PeftModel

    model = open_plain(base, **options)
    with quiet_transformers():
        return PeftModel.from_pretrained(model, str(adapter)).eval()


def chats(path: Path, count: int = 24) -> Path:
    """Write a file of conversations, once: a rank that wrote it again would change the time by which caches know it."""
    if not path.exists():
        draft = write_jsonl(path.with_name(f"{path.name}.{os.getpid()}"), [chat(number) for number in range(count)])
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path


def data_loader(data: Path, base: Path, cache: Path, **options: Any) -> DataLoader[Any]:
    """Return batches of conversations."""
    from transformers import AutoTokenizer

    made = RecipeData(DataSettings(data, **options), AutoTokenizer.from_pretrained(base), cache)
    made.prepare_data()
    made.setup("fit")
    return made.train_dataloader()


def run_folder(
    run: Path,
    base: Path,
    kind: str = "lora",
    *,
    strategy: Any = "auto",
    size: int = 1,
    targets: str | Sequence[str] = "all-linear",
    **options: Any,
) -> Path:
    """Train for some steps, and leave a run: recipe.yaml, tokenizer, data and a checkpoint; return its folder.

    Args:
        run: Folder to make; on each rank.
        base: Model folder.
        kind: As of `recipe_models.settings`.
        strategy: Of the trainer.
        size: Number of processes.
        targets: Layers with adapters.
        options: Of `ModelSettings`.
    """
    model = settings(base, kind, **options)
    if model.lora is not None:
        model = dataclasses.replace(model, lora=LoraSettings(r=4, alpha=8, targets=targets, dora=kind == "dora"))
    run.mkdir(parents=True, exist_ok=True)
    data, val_data = chats(run / "chats.jsonl"), chats(run / "held.jsonl", 6)
    shared = {"data": str(data), "val_data": str(val_data), "max_length": 64, "packing": False, "micro_batch": 2}
    steps = trainer(strategy, size, limit_val_batches=0)
    module = RecipeModule(model, OptimizerSettings(learning_rate=2e-2, eps=1e-4), 4, verify_packing=False)
    steps.fit(module, data_loader(data, base, run / "cache", max_length=64, packing=False, micro_batch=2))
    steps.save_checkpoint(run / "checkpoints" / "last.ckpt")
    if steps.is_global_zero:
        written = {"command": "finetune", "settings": {"model": str(base), "method": kind, **shared}}
        (run / "recipe.yaml").write_text(yaml.safe_dump(written))
        small_tokenizer().save_pretrained(run / "tokenizer")
    return run


def trained_state(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a run's checkpoint, by the names of transformers and peft."""
    from loopwright import checkpoint

    state = checkpoint.load(run / "checkpoints" / "last.ckpt")["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items()}


def model_settings(base: Path) -> ModelSettings:
    """Return settings of full training."""
    return settings(base)
