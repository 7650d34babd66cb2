"""Inputs of the comparison of finetuning programs: `python -m language_models.inputs FOLDER STEPS`, in .venv-peers.

Writes a small Llama with random weights as a Hugging Face folder, the same weights converted by LitGPT's own function,
a tokenizer whose tokens are words, and two sets of instruct data: samples of equal and of different lengths. Prints
their sizes as JSON, and the largest difference between the logits of the two models.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

# Any in this file: JSON; litgpt is not installed where types are checked.

VOCABULARY = 4096
LENGTH = 256  # tokens in the longest sample
MICRO_BATCH = 4
LEARNING_RATE = 1e-3
WARMUP_STEPS = 3
SIZE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
# LitGPT converts models that it knows by name; this one is added to its table.
LITGPT_NAME = "Llama-small-for-benchmarks"


def words(draw: random.Random, count: int) -> list[str]:
    """Return words with frequencies as in a language: the loss falls within a few steps."""
    return [f"w{min(int(draw.paretovariate(0.7)), VOCABULARY - 3)}" for _ in range(count)]


def sample(draw: random.Random, prompt: int, answer: int) -> dict[str, str]:
    """Return a record with as many tokens; the end token comes on top."""
    return {"instruction": " ".join(words(draw, prompt)) + " ", "output": " ".join(words(draw, answer))}


def equal_lengths(count: int) -> list[dict[str, str]]:
    """Return samples of `LENGTH` tokens, half of them trained."""
    draw = random.Random(1)
    return [sample(draw, LENGTH // 2, LENGTH // 2 - 1) for _ in range(count)]


def different_lengths(count: int) -> list[dict[str, str]]:
    """Return samples whose prompts and answers are mostly short, and up to `LENGTH` tokens together."""
    draw = random.Random(2)
    lengths = [[min(int(draw.lognormvariate(3.6, 0.7)) + 4, LENGTH // 2 - 1) for _ in range(2)] for _ in range(count)]
    return [sample(draw, prompt, answer) for prompt, answer in lengths]


def trained_tokens(records: list[dict[str, str]]) -> int:
    """Return the tokens of the answers with their end tokens."""
    return sum(len(record["output"].split()) + 1 for record in records)


def write_data(folder: Path, records: list[dict[str, str]]) -> dict[str, int]:
    """Write the records for every program, and return their numbers."""
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    # LitGPT reads a folder with two lists; it validates on a few samples before it trains.
    (folder / "train.json").write_text(json.dumps(records))
    (folder / "val.json").write_text(json.dumps(records[:MICRO_BATCH]))
    return {"samples": len(records), "trained_tokens": trained_tokens(records)}


def write_model(folder: Path) -> Any:
    """Save the model and its tokenizer, and return the model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {"<end>": 0, "<unknown>": 1, **{f"w{at}": at + 1 for at in range(1, VOCABULARY - 1)}}
    rules = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(str(folder))
    sizes: dict[str, Any] = SIZE
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=2 * LENGTH, eos_token_id=0, bos_token_id=None, pad_token_id=0,
        num_key_value_heads=SIZE["num_attention_heads"], tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(str(folder))
    return model


def convert(folder: Path, model: Any) -> float:
    """Let LitGPT convert the folder in place, and return the largest difference between the logits."""
    import torch
    from litgpt.config import name_to_config
    from litgpt.model import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    name_to_config[LITGPT_NAME] = {
        "name": LITGPT_NAME,
        "hf_config": {},
        "block_size": model.config.max_position_embeddings,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY,
        "n_layer": SIZE["num_hidden_layers"],
        "n_head": SIZE["num_attention_heads"],
        "n_embd": SIZE["hidden_size"],
        "intermediate_size": SIZE["intermediate_size"],
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": model.config.rms_norm_eps,
        "mlp_class_name": "LLaMAMLP",
    }
    convert_hf_checkpoint(folder, model_name=LITGPT_NAME)
    other = GPT(Config.from_file(folder / "model_config.yaml"))
    other.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True))
    ids = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference: float = (model(ids).logits - other(ids)).abs().max().item()
    return difference


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    model = write_model(folder / "model")
    shutil.copytree(folder / "model", folder / "litgpt")
    difference = convert(folder / "litgpt", model)
    count = num_steps * MICRO_BATCH
    print(
        json.dumps(
            {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "logits_difference": difference,
                "equal": write_data(folder / "equal", equal_lengths(count)),
                "different": write_data(folder / "different", different_lengths(count)),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
