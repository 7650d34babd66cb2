"""Finetuning programs that are compared with the recipe: `python -m language_models.programs NAME MODEL DATA OUT`.

Each prints `step N loss X` after each optimizer step: a hand-written loop over transformers, its Trainer, and TRL's
SFTTrainer. AdamW, one epoch, batches of 4 samples, no clipping, float32, no gradient checkpointing; the rest are the
defaults of the program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from language_models.inputs import LEARNING_RATE, LENGTH, MICRO_BATCH, WARMUP_STEPS

# Any in this file: JSON, and objects of libraries that are not installed where types are checked.

# Of transformers.TrainingArguments, for both trainers.
ARGUMENTS: dict[str, Any] = {
    "num_train_epochs": 1,
    "per_device_train_batch_size": MICRO_BATCH,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "cosine",
    "warmup_steps": WARMUP_STEPS,
    "optim": "adamw_torch",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def read(data: Path) -> list[dict[str, str]]:
    """Return the records."""
    return [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]


def encode(model: Path, data: Path) -> list[dict[str, list[int]]]:
    """Return ids and labels of each sample, where only the answer and its end are trained."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    samples = []
    for record in read(data):
        prompt = tokenizer(record["instruction"], add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(record["output"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        samples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return samples


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad on the right; there is a mask only if something is padded."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([torch.tensor(sample[key]) for sample in samples] for key in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    return batch if bool(mask.all()) else {**batch, "attention_mask": mask}


def hand(model: Path, data: Path, out: Path) -> None:
    """Train in a loop over the model of transformers and torch's AdamW."""
    import torch
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    samples = encode(model, data)
    net = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    torch.manual_seed(0)
    # A list is a data set, but not for type checkers.
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        samples,  # type: ignore[arg-type]
        MICRO_BATCH,
        shuffle=True,
        collate_fn=collate,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, len(loader))
    for step, batch in enumerate(loader, start=1):
        loss = net(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    net.save_pretrained(str(out))


def hf_trainer(model: Path, data: Path, out: Path) -> None:
    """Train with transformers' Trainer."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    samples: Any = encode(model, data)
    net = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    arguments = TrainingArguments(output_dir=str(out), remove_unused_columns=False, **ARGUMENTS)
    trainer = Trainer(net, arguments, train_dataset=samples, data_collator=collate, callbacks=[_printer()])
    trainer.train()
    trainer.save_model(str(out))


def sft_trainer(model: Path, data: Path, out: Path) -> None:
    """Train with TRL's SFTTrainer on prompts and completions."""
    import trl
    from datasets import Dataset

    records = [{"prompt": record["instruction"], "completion": record["output"]} for record in read(data)]
    arguments = trl.SFTConfig(output_dir=str(out), max_length=LENGTH, **ARGUMENTS)
    trainer = trl.SFTTrainer(str(model), arguments, train_dataset=Dataset.from_list(records), callbacks=[_printer()])
    trainer.train()
    trainer.save_model(str(out))


def _printer() -> Any:
    from transformers import TrainerCallback

    class Printer(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if "loss" in logs:
                print(f"step {state.global_step} loss {float(logs['loss']):.4f}", flush=True)

    return Printer()


PROGRAMS: dict[str, Callable[[Path, Path, Path], None]] = {
    "hand": hand,
    "hf": hf_trainer,
    "sft": sft_trainer,
}


def main() -> None:
    name, *folders = sys.argv[1:]
    model, data, out = map(Path, folders)
    PROGRAMS[name](model, data, out)


if __name__ == "__main__":
    main()
