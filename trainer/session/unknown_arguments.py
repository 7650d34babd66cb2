"""Errors for unknown arguments of a Trainer; imported only if there are any."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from ...errors import UnknownArgument, nearest

REPLACEMENTS = {
    "amp": "precision='16-mixed' or 'bf16-mixed'",
    "amp_backend": "precision='16-mixed' or 'bf16-mixed'",
    "amp_level": "precision='16-mixed' or 'bf16-mixed'",
    "auto_lr_find": "callbacks=[LearningRateFinder()], or Tuner(trainer).lr_find(model)",
    "auto_scale_batch_size": "callbacks=[BatchSizeFinder()], or Tuner(trainer).scale_batch_size(model)",
    "auto_select_gpus": "devices=",
    "batch_size": "DataLoader(..., batch_size=...); or global_batch_size= for the samples of a step on all ranks",
    "bf16": "precision='bf16-mixed'",
    "checkpoint_callback": "enable_checkpointing=",
    "ckpt_path": "trainer.fit(model, ckpt_path=...)",
    "distributed_backend": "strategy=",
    "early_stopping": "callbacks=[EarlyStopping(monitor=...)]",
    "epochs": "max_epochs=",
    "flush_logs_every_n_steps": "CSVLogger(flush_logs_every_n_steps=...)",
    "fp16": "precision='16-mixed'",
    "gpus": "accelerator='gpu', devices=...",
    "gradient_accumulation_steps": "accumulate_grad_batches=",
    "gradient_clipping": "gradient_clip_val=",
    "ipus": "accelerator= and devices=",
    "learning_rate": "the optimizer's lr, in configure_optimizers",
    "log_dir": "default_root_dir=, or logger=CSVLogger(save_dir=...)",
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "loggers": "logger=[...]",
    "loss": "the loss in training_step",
    "lr": "the optimizer's lr, in configure_optimizers",
    "max_grad_norm": "gradient_clip_val=",
    "mixed_precision": "precision='16-mixed' or 'bf16-mixed'",
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode)",
    "n_gpus": "accelerator='gpu', devices=...",
    "nodes": "num_nodes=",
    "num_epochs": "max_epochs=",
    "num_gpus": "accelerator='gpu', devices=...",
    "num_processes": "accelerator='cpu', devices=...",
    "num_train_epochs": "max_epochs=",
    "optimizer": "an optimizer, returned from configure_optimizers",
    "output_dir": "default_root_dir=",
    "process_position": "TQDMProgressBar(process_position=...)",
    "progress_bar": "enable_progress_bar=",
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate=...)], or enable_progress_bar=False",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "resume": "trainer.fit(model, ckpt_path='last')",
    "replace_sampler_ddp": "use_distributed_sampler=",
    "resume_from": "trainer.fit(model, ckpt_path=...)",
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path=...)",
    "scheduler": "a schedule, returned from configure_optimizers",
    "seed": "seed_everything(...)",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(swa_lrs=...)]",
    "terminate_on_nan": "nonfinite_loss='raise'",
    "tpu_cores": "accelerator='tpu', devices=...",
    "track_grad_norm": "a log of the norm in on_before_optimizer_step",
    "truncated_bptt_steps": "a loop over parts of the batch, in manual optimization",
    "verbose": "enable_progress_bar=, enable_model_summary= or LOOPWRIGHT_LOG_LEVEL in the environment",
    "warmup_steps": "a schedule, returned from configure_optimizers",
    "weights_save_path": "default_root_dir=, or ModelCheckpoint(dirpath=...)",
    "weights_summary": "enable_model_summary=, or callbacks=[ModelSummary(max_depth=...)]",
}
"""Replacements for arguments of other trainers and of earlier Lightning."""


def refuse_arguments(unknown: Iterable[str], known: Collection[str]) -> NoReturn:
    """Raise an error that names what to write instead.

    Args:
        unknown: Names that were passed.
        known: Names of the valid arguments.

    Raises:
        UnknownArgument: Always.
    """
    names = sorted(unknown)
    named = ", ".join(f"{name}={nearest(name, known)}" if name not in REPLACEMENTS else f"{name}=" for name in names)
    replaced = [f"{REPLACEMENTS[name]} instead of {name}=" for name in names if name in REPLACEMENTS]
    fix = f"write {'; '.join(replaced)}." if replaced else "help(loopwright.Trainer) lists the arguments."
    raise UnknownArgument(f"Trainer has no argument{'s' if len(names) > 1 else ''} {named}.", fix=fix)
