"""Small language models with random weights, as folders, and packed batches for them. Nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright.recipes.model.settings import LoraSettings, ModelSettings

# Any in this file: transformers, which has no types here, and batches.

VOCAB = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "gpt2", "mistral")


def import_libraries() -> None:
    """Import once, and not in every forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft  # noqa: F401
        from transformers import LlamaForCausalLM  # noqa: F401


def config(family: str, **changes: Any) -> Any:
    """Return a configuration of a tiny model."""
    import transformers as hf

    made = {
        "llama": lambda: hf.LlamaConfig(**{**ROPE, **TOKENS, **changes}),
        "qwen3": lambda: hf.Qwen3Config(**{**ROPE, **TOKENS, "head_dim": 8, **changes}),
        "mistral": lambda: hf.MistralConfig(**{**ROPE, **TOKENS, "sliding_window": 6, **changes}),
        "gemma3": lambda: hf.Gemma3TextConfig(**{**ROPE, **TOKENS, "head_dim": 8, "sliding_window": 6, **changes}),
        "gemma2": lambda: hf.Gemma2Config(
            **{**ROPE, **TOKENS, "head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0, **changes}
        ),
        "cohere": lambda: hf.CohereConfig(**{**ROPE, **TOKENS, "logit_scale": 0.25, **changes}),
        "mixtral": lambda: hf.MixtralConfig(**{**ROPE, **TOKENS, **ROUTED, "num_local_experts": 4, **changes}),
        "bamba": lambda: hf.BambaConfig(
            **{
                **ROPE, **TOKENS, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                "mamba_n_groups": 1, "mamba_chunk_size": 8, "z_loss_coefficient": 0.1, **changes,
            }
        ),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **{**ROPE, **TOKENS, **ROUTED, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, **changes}
        ),
        "gpt2": lambda: hf.GPT2Config(
            **{
                **TOKENS, "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes,
            }
        ),
    }  # fmt: skip
    return made[family]()


def save_model(
    folder: Path, family: str = "llama", seed: int = 3, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Save a model with random weights, larger ones than at its initialization, and return its folder."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(family, **changes)).to(dtype)
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn(one.shape).to(one) * 0.1)  # so that attention is not nearly uniform
        with quiet():
            model.save_pretrained(folder)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield


def settings(folder: Path, kind: str = "full", **changes: Any) -> ModelSettings:
    """Return settings of a kind: full, lora, dora or nf4."""
    lora = None if kind == "full" else LoraSettings(r=4, alpha=8, dora=kind == "dora")
    quantize = "nf4" if kind == "nf4" else None
    return ModelSettings(**{"model": folder, "lora": lora, "quantize": quantize, "seed": 5, **changes})


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of samples of different lengths, some of them with a prompt that is not trained, and padding."""

    def __init__(self, rows: int = 32, length: int = 16, seed: int = 1, is_packed: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [row(length, generator, is_packed) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def row(length: int, generator: torch.Generator, is_packed: bool = True) -> dict[str, Tensor]:
    """Return a row as `RecipeData` makes it."""
    ids = torch.randint(3, VOCAB, (length,), generator=generator)
    labels = torch.full((length,), -100)
    positions = torch.arange(length)
    at = 0
    while at < length - 3:
        size = int(torch.randint(3, 8, (), generator=generator)) if is_packed else length - 3
        size = min(size, length - at)
        prompt = int(torch.randint(0, size - 1, (), generator=generator))
        labels[at + prompt : at + size - 1] = ids[at + prompt + 1 : at + size]
        positions[at : at + size] = torch.arange(size)
        at += size
    ids[at:] = 0
    positions[at:] = torch.arange(length - at) + positions[at - 1] + 1
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def loader(batch_size: int, rows: int = 32, **options: Any) -> DataLoader[dict[str, Tensor]]:
    """Return batches of rows."""
    return DataLoader(Rows(rows, **options), batch_size=batch_size)


def batch(rows: int = 4, **options: Any) -> dict[str, Tensor]:
    """Return the first batch."""
    return next(iter(loader(rows, rows=rows, **options)))


def trainer(strategy: Any = "auto", size: int = 1, *, has_val: bool = False, **options: Any) -> lw.Trainer:
    """Return a quiet trainer on CPUs."""
    return lw.Trainer(
        **{
            "limit_val_batches": 1.0 if has_val else 0, "accelerator": "cpu", "devices": size, "strategy": strategy,
            "max_steps": 4, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **options,
        }
    )  # fmt: skip


def own_loss(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and the number of trained tokens, computed without Loopwright."""
    logits = model(input_ids=given["input_ids"], position_ids=given["position_ids"], use_cache=False).logits
    labels = given["labels"]
    kept = labels != -100
    picked = torch.log_softmax(logits.double() if logits.dtype == torch.float64 else logits.float(), dim=-1)
    return -picked[kept].gather(1, labels[kept, None]).sum(), kept.sum()
