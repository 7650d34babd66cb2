"""Small models of transformers, built from configurations; imported where transformers is installed."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["SMALL", "TEXT", "Wide", "batch", "model"]

# Any in this file: transformers, which has no types here.

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
TEXT = {"vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def model(kind: str) -> Any:
    """Return a model in float64, in training mode.

    It is llama, qwen3, gemma3 (tied), gpt2 (tied), bert (tied), vit, opt (a norm is registered before the blocks), or
    t5 and bart (encoders and decoders).
    """
    torch.manual_seed(0)
    rope = {**SMALL, **TEXT, "num_key_value_heads": 2, "use_cache": False}
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**rope))
    elif kind == "qwen3":
        made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**rope, head_dim=8))
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(**rope, head_dim=8, sliding_window=4, tie_word_embeddings=True)
        made = transformers.Gemma3ForCausalLM(config)
    elif kind == "gpt2":
        text = {key: one for key, one in TEXT.items() if key != "max_position_embeddings"}
        config = transformers.GPT2Config(
            **text, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        made = transformers.GPT2LMHeadModel(config)
    elif kind == "opt":
        config = transformers.OPTConfig(
            **{**SMALL, **TEXT}, ffn_dim=64, word_embed_proj_dim=16, dropout=0.0, use_cache=False
        )
        made = transformers.OPTForCausalLM(config)
    elif kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        made = transformers.T5ForConditionalGeneration(config)
    elif kind == "bart":
        sizes = {f"{side}_{key}": one for side in ("encoder", "decoder") for key, one in SIZES.items()}
        config = transformers.BartConfig(
            **TEXT, **sizes, d_model=32, dropout=0.0, use_cache=False, decoder_start_token_id=2
        )
        made = transformers.BartForConditionalGeneration(config)
    elif kind == "bert":
        config = transformers.BertConfig(**SMALL, **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        made = transformers.BertForMaskedLM(config)
    else:
        config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5)
        made = transformers.ViTForImageClassification(config)
    return made.double().train()


def batch(kind: str, step: int, count: int = 4) -> dict[str, Tensor]:
    """Return inputs and labels of `count` samples."""
    generator = torch.Generator().manual_seed(step)
    if kind == "vit":
        images = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (count,), generator=generator)}
    indices = torch.randint(3, 64, (count, 8), generator=generator)
    if kind in ("t5", "bart"):
        mask = torch.ones_like(indices)
        mask[::2, -2:] = 0
        return {"input_ids": indices, "attention_mask": mask, "labels": indices[:, :6].flip(1)}
    return {"input_ids": indices, "labels": indices}


class Wide(TorchFunctionMode):
    """Lets models compute in float64 where their code asks for float32: in norms, and in the loss."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
