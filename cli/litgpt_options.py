"""Options of LitGPT's commands, and the settings of recipes that do the same: for errors about unknown settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# By option, without the value: docs/from-litgpt.md has the values.
LITGPT_OPTIONS = {
    "checkpoint_dir": "model", "model_name": "model", "initial_checkpoint_dir": "model with from_scratch=false",
    "tokenizer_dir": "tokenizer", "out_dir": "out", "num_nodes": "trainer.num_nodes",
    "logger_name": "trainer.logger", "compiler": "trainer.compile", "profile": "trainer.profiler",
    "lora_r": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    **dict.fromkeys(
        ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head"), "lora.targets"
    ),
    "train.micro_batch_size": "micro_batch", "train.global_batch_size": "global_batch",
    "train.max_seq_length": "max_length", "train.epochs": "epochs", "train.max_steps": "steps",
    "train.max_tokens": "tokens", "train.learning_rate": "learning_rate", "train.weight_decay": "weight_decay",
    "train.lr_warmup_steps": "warmup", "train.min_lr": "min_lr, as a share of the largest rate",
    "train.max_norm": "trainer.gradient_clip_val", "train.max_time": "trainer.max_time",
    "train.save_interval": "save_every", "train.log_interval": "trainer.log_every_n_steps",
    "eval.interval": "val_every", "data.json_path": "data", "data.train_data_path": "data",
    "data.val_data_path": "val_data", "data.val_split_fraction": "val_fraction", "data.prompt_style": "prompt_style",
    "data.mask_prompt": "train_on",
}  # fmt: skip


def options_in(name: str, value: object) -> Iterator[str]:
    """Yield the options of LitGPT in a setting of this name and value, such as "train.micro_batch_size" in "train"."""
    given = value.get("init_args", value) if isinstance(value, Mapping) else {}  # --data JSON --data.json_path FILE
    keys = [f"{name}.{key}" for key in given] if isinstance(given, Mapping) and given else [name]
    yield from (key for key in keys if key in LITGPT_OPTIONS)
