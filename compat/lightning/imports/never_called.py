"""Methods of Lightning's classes that Loopwright never calls: overriding one has no effect.

For strategies and precisions `check_overrides` warns of them when a Trainer is made; `loopwright migrate check` lists
them all.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from itertools import repeat

from ....errors import MissingDependency

__all__ = ["LOOPS", "NEVER_CALLED", "find_never_called"]

# Class of Lightning -> names of its methods.
NEVER_CALLED = {
    "Strategy": "_configure_launcher _reset_optimizers_and_schedulers _setup_model _setup_model_and_optimizers "
    "_setup_optimizer batch_to_device connect lightning_module_state_dict load_checkpoint "
    "load_model_state_dict load_optimizer_state_dict model_sharded_context model_to_device "
    "on_exception post_backward post_training_step pre_backward process_dataloader remove_checkpoint "
    "restore_checkpoint_after_setup save_checkpoint setup_optimizers setup_precision_plugin "
    "tensor_init_context",
    "DDPStrategy": "_get_process_group_backend _register_ddp_hooks block_backward_sync configure_ddp "
    "determine_ddp_device_ids set_world_ranks",
    "FSDPStrategy": "_determine_device_ids _get_process_group_backend block_backward_sync set_world_ranks",
    "Precision": "_after_closure _clip_gradients _wrap_closure connect main_params on_load_checkpoint "
    "on_save_checkpoint predict_step_context test_step_context train_step_context val_step_context",
    "SLURMEnvironment": "_validate_srun_used _validate_srun_variables",
    "CSVLogger": "_get_next_version",
    "TensorBoardLogger": "_get_next_version _sanitize_params",
    "WandbLogger": "_scan_and_log_checkpoints",
    "LightningModule": "_apply_batch_transfer_handler _call_batch_hook _log_dict_through_fabric "
    "_verify_is_manual_optimization",
    "Trainer": "_active_loop _evaluation_loop _fit_impl _predict_impl _run _run_sanity_check _run_stage _teardown "
    "_test_impl _validate_impl",
    "ModelCheckpoint": "_find_last_checkpoints _format_checkpoint_name _get_metric_interpolated_filepath_name "
    "_link_checkpoint _save_last_checkpoint _save_monitor_checkpoint "
    "_save_none_monitor_checkpoint _save_topk_checkpoint _should_remove_checkpoint "
    "_should_save_on_exception _should_save_on_train_epoch_end _should_skip_saving_checkpoint "
    "_update_best_and_save",
    "EarlyStopping": "_evaluate_stopping_criteria _improvement_message _log_info _run_early_stopping_check "
    "_should_skip_check _validate_condition_metric",
    "TQDMProgressBar": "_resolve_refresh_rate _should_update",
    "RichProgressBar": "_add_task _get_train_description _init_progress _initialize_train_progress_bar_id "
    "_reset_progress_bar_ids _stop_progress _update _update_metrics",
    "BaseFinetuning": "_apply_mapping_to_param_groups _store",
    "Profiler": "_prepare_filename _prepare_streams _rank_zero_info _stats_to_str",
    "LightningCLI": "_add_subcommands _dump_config",
    "Fabric": "_configure_callbacks _filter_kwargs_for_callback _get_distributed_sampler _move_model_to_device "
    "_prepare_run_method _requires_distributed_sampler _setup_dataloader _validate_launched "
    "_validate_setup _validate_setup_dataloaders _validate_setup_module _validate_setup_optimizers "
    "_wrap_and_launch _wrap_with_setup",
    "LearningRateMonitor": "_add_prefix _add_suffix _check_duplicates_and_update_name _duplicate_param_group_names "
    "_extract_lr _extract_momentum _extract_stats _extract_weight_decay "
    "_find_names_from_optimizers _find_names_from_schedulers _get_optimizer_stats "
    "_remap_keys",
    "StochasticWeightAveraging": "_clear_schedulers _load_average_model_state reset_batch_norm_and_save_state "
    "reset_momenta transfer_weights update_parameters",
    "WeightAveraging": "_copy_average_to_current _swap_models",
    "ModelPruning": "_apply_global_pruning _apply_local_pruning _copy_param _create_pruning_fn _get_pruned_stats "
    "_is_pruning_method _log_sparsity_stats _make_pruning_permanent_on_state_dict "
    "_resolve_global_kwargs _run_pruning _wrap_pruning_fn",
    "Timer": "_check_time_remaining",
    "DeviceStatsMonitor": "_get_and_log_device_stats",
}  # fmt: skip
# Classes none of whose methods is called: their counts can be read.
LOOPS = ("_Loop", "_FitLoop", "_TrainingEpochLoop", "_EvaluationLoop", "_PredictionLoop")

_MODULES = (
    "lightning.pytorch", "lightning.pytorch.callbacks", "lightning.pytorch.strategies", "lightning.pytorch.plugins",
    "lightning.pytorch.loggers", "lightning.pytorch.profilers", "lightning.pytorch.cli", "lightning.pytorch.loops",
    "lightning.fabric", "lightning.fabric.plugins.environments",
)  # fmt: skip


def find_never_called(base: type) -> dict[str, str]:
    """Return the methods that a subclass overrides without effect, and the class of Lightning that has each.

    Lightning's names must be Loopwright's in this process. Of a loop, "*" stands for all methods.

    Args:
        base: A class that a program derives from, or one of its bases.
    """
    found: dict[str, str] = {}
    for name in (*LOOPS, *NEVER_CALLED):
        owner = next((one for one in map(_class_of, _MODULES, repeat(name)) if one is not None), None)
        if owner is not None and issubclass(base, owner):
            found.update(dict.fromkeys(["*"] if name in LOOPS else NEVER_CALLED[name].split(), name))
    return found


def _class_of(module: str, name: str) -> type | None:
    try:
        found = getattr(import_module(module), name, None)
    except MissingDependency:  # LightningCLI without jsonargparse: no class derives from it here
        return None
    return found if inspect.isclass(found) else None
