"""What a step of a recipe needs, against the arithmetic of `loopwright recipe plan`; run.py prints it.

This file is also the program that is measured: `python -m language_models.memory CASE FOLDER`. It counts the
storages of live tensors, which does not depend on the machine or its load: before an optimizer step, and at the peak.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp import LiveTensors, run_program, silence
from tables import table

from loopwright.strategies.optional import memory_shares

# Any in this file: arguments of settings, hooks, and measured numbers as they are in results/latest.json.

ROWS, LENGTH, VOCABULARY = 2, 256, 16384
SIZE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
CHUNK = 64
LORA = {"method": "lora", "chunk_tokens": CHUNK}
CASES: dict[str, dict[str, Any]] = {
    "all logits at once": {"method": "full", "chunk_tokens": 0},
    f"logits of {CHUNK} tokens at a time": {"method": "full", "chunk_tokens": CHUNK},
    "the same, gradient checkpointing": {"method": "full", "chunk_tokens": CHUNK, "gradient_checkpointing": True},
    "LoRA": LORA,
    "LoRA on nf4": {**LORA, "quantize": "nf4"},
}


# --- tables for run.py ------------------------------------------------------------------------------------------------


def measure_recipes_memory() -> dict[str, Any]:
    """Measure every case in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        return {"rows": [run_program("language_models.memory", case, folder) for case in CASES]}


def describe_recipes_memory(numbers: dict[str, Any]) -> list[str]:
    """Return the section."""
    return [
        "## Memory of a recipe's step",
        f"A Llama of {numbers['rows'][0]['elements'] / 1e6:.1f} million parameters with {VOCABULARY:,} tokens in its "
        f"vocabulary, {ROWS} rows of {LENGTH} tokens, all of them trained, AdamW, float32, one process. MB of live "
        "tensors before an optimizer step (weights, gradients, the optimizer's state), and at the peak of a step, "
        "beside what `loopwright recipe plan` computes from the configuration. Its activations are an estimate.",
        table(
            ("", "before the step", "plan", "ratio", "peak", "plan", "ratio", "plan: activations", "plan: logits"),
            (_row(row, row["plan"]) for row in numbers["rows"]),
        ),
    ]


def _row(row: dict[str, Any], plan: dict[str, float]) -> tuple[str, ...]:
    total = sum(plan.values())
    values = (row["state"], plan["state"], 0, row["peak"], total, 0, plan["activations"], plan["logits"])
    cells = [f"{value / 1e6:.1f}" for value in values]
    cells[2], cells[5] = f"**{row['state'] / plan['state']:.2f}**", f"**{row['peak'] / total:.2f}**"
    return row["case"], *cells


# --- the program ------------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """Save the model with random weights, once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if not folder.exists():
        torch.manual_seed(0)
        sizes: dict[str, Any] = SIZE
        config = LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, tie_word_embeddings=False,
            num_key_value_heads=SIZE["num_attention_heads"], **sizes,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


def batches(count: int) -> Iterator[dict[str, Any]]:
    """Give batches whose tokens are all trained."""
    import torch

    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draw)
        yield {
            "input_ids": ids,
            "labels": ids.roll(-1, 1),
            "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH).clone(),
        }


def measure(case: str, folder: Path) -> dict[str, Any]:
    """Train for three steps, and return the bytes of the last one and the plan's."""
    import torch

    import loopwright as lw
    from loopwright.recipes.memory import count_sizes, plan_memory
    from loopwright.recipes.module import RecipeModule
    from loopwright.recipes.settings import FinetuneSettings

    live = LiveTensors()
    found: dict[str, int] = {}

    class Notes(lw.Callback):
        """Notes what is alive at most in each batch, and before the optimizer's step."""

        # Any: the types of hooks.
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            live.peak_bytes = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found.update(peak=live.peak_bytes, state=live.live_bytes())

    torch.set_num_threads(1)
    settings = FinetuneSettings(
        model=write_model(folder / "model"), out=folder / "out", data="none", max_length=LENGTH, micro_batch=ROWS,
        **CASES[case],
    )  # fmt: skip
    sizes = count_sizes(settings.model_settings())
    with silence():
        trainer = lw.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Notes()], logger=False,
                             enable_checkpointing=False, enable_progress_bar=False,
                             enable_model_summary=False)  # fmt: skip
        module = RecipeModule(
            settings.model_settings(), settings.optimizer_settings(), 3, chunk_tokens=settings.chunk_tokens,
            verify_packing=False,
        )  # fmt: skip
        with live:
            trainer.fit(module, list(batches(3)))
    plan = plan_memory(settings, sizes, memory_shares(trainer.strategy, 1, 1))
    return {
        "case": case,
        "elements": sizes.trained + sizes.frozen,
        **found,
        "plan": {"state": plan.state, "activations": plan.activations, "logits": plan.logits},
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))), flush=True)
