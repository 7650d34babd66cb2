"""The second table: the meaning of each name of Lightning. paths.py, the first table, has the modules of the names.

A home is `module` or `module:name` within loopwright, or `!why` for a name that is not supported.
"""

from __future__ import annotations

from .paths import PATHS

__all__ = ["find_home", "has_home", "shown_paths"]

_OWN = "compat.lightning"

# Module of loopwright -> names of Lightning that it provides; `A=B` is Lightning's A, which is called B there.
_HOMES = {
    "accelerators": "Accelerator CPUAccelerator CUDAAccelerator "
    "MPSAccelerator XLAAccelerator TPUAccelerator=XLAAccelerator find_usable_cuda_devices",
    "callbacks": "BackboneFinetuning BaseFinetuning BatchSizeFinder Callback Checkpoint "
    "DeviceStatsMonitor EMAWeightAveraging EarlyStopping EarlyStoppingReason GradientAccumulationScheduler "
    "LambdaCallback LearningRateFinder LearningRateMonitor ModelPruning ModelSummary "
    "OnExceptionCheckpoint RichModelSummary RichProgressBarTheme ThroughputMonitor TrainingSpikeException",
    "callbacks.finetuning": "multiplicative",
    "checkpoint": "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO=TorchCheckpointIO",
    "data": "AttributeDict",
    "fabric": "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment "
    "SLURMEnvironment TorchElasticEnvironment is_wrapped isolate_rng pl_worker_init_function reset_seed "
    "seed_everything",
    "fabric.peak_flops": "get_available_flops",
    "fabric.throughput": "Throughput measure_flops",
    "loggers": "DummyLogger Logger rank_zero_experiment",
    "loggers.base": "DummyExperiment",
    "loggers.csv_logger": "ExperimentWriter",
    "profilers": "PassThroughProfiler XLAProfiler",
    "strategies": "LayerSync TorchSyncBatchNorm",
    f"{_OWN}.strategies": "DDPStrategy DataParallelStrategy DeepSpeedStrategy FSDPStrategy "
    "ModelParallelStrategy ParallelStrategy SingleDeviceStrategy SingleDeviceXLAStrategy Strategy "
    "XLAFSDPStrategy XLAStrategy SingleTPUStrategy=SingleDeviceXLAStrategy",
    "trainer.loop.schedule": "LRSchedulerConfig",
    "tuner": "Tuner _LRFinder=LearningRateCurve",
    f"{_OWN}.cli.argument_parser": "LightningArgumentParser",
    f"{_OWN}.cli.instantiation": "LRSchedulerCallable LRSchedulerTypeTuple OptimizerCallable ReduceLROnPlateau "
    "instantiate_class instantiate_module",
    f"{_OWN}.cli.lightning_cli": "LightningCLI",
    f"{_OWN}.cli.save_config": "SaveConfigCallback",
    f"{_OWN}.collectives": "Collective SingleDeviceCollective TorchCollective",
    f"{_OWN}.connectors": "_AcceleratorConnector _CallbackConnector _CheckpointConnector _OUT_DICT "
    "_ResultCollection=ResultsView _ResultMetric",
    f"{_OWN}.utilities.demos": "BoringDataModule BoringDataModuleNoLen BoringModel DemoModel IterableBoringDataModule "
    "ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen",
    f"{_OWN}.enums": "GradClipAlgorithmType Interval LightningEnum RestartStage RunningStage "
    "TrainerFn TrainerState TrainerStatus WriteInterval",
    f"{_OWN}.errors": "LightningDeprecationWarning MisconfigurationException PossibleUserWarning SIGTERMException "
    "_TunerExitException disable_possible_user_warnings",
    f"{_OWN}.fabric": "Fabric _FabricModule=FabricModule find_free_network_port _unwrap_objects=unwrap_objects",
    "fabric.dataloaders": "_FabricDataLoader=FabricDataLoader",
    "fabric.wrappers": "_FabricOptimizer=FabricOptimizer",
    f"{_OWN}.loops": "_EvaluationLoop=LoopView _FitLoop=TrainLoop _Loop=LoopView _PredictionLoop=LoopView "
    "_TrainingEpochLoop=LoopView",
    f"{_OWN}.utilities.logger_params": "_add_prefix=add_prefix _convert_json_serializable=convert_json_serializable "
    "_convert_params=convert_params _flatten_dict=flatten_dict _sanitize_callable_params=sanitize_callable_params "
    "_sanitize_params=sanitize_params _scan_checkpoints=scan_checkpoints",
    f"{_OWN}.utilities.files": "_NotYetLoadedTensor _atomic_save _is_dir _lazy_load _load get_filesystem "
    "load_hparams_from_tags_csv load_hparams_from_yaml "
    "save_hparams_to_tags_csv save_hparams_to_yaml is_shared_filesystem",
    f"{_OWN}.utilities.hparams": "HyperparametersMixin clean_namespace collect_init_args get_init_args is_picklable "
    "lightning_getattr lightning_hasattr lightning_setattr parse_class_init_keys save_hyperparameters update_hparams",
    f"{_OWN}.utilities.versions": "__version__ module_available package_available",
    f"{_OWN}.loggers": "CSVLogger CometLogger MLFlowLogger TensorBoardLogger WandbLogger merge_dicts",
    f"{_OWN}.utilities.memory": "garbage_collection_cuda get_cpu_stats get_device_stats get_nvidia_gpu_stats "
    "is_cuda_available is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory num_cuda_devices "
    "recursive_detach",
    f"{_OWN}.module": "CheckpointHooks DataHooks LightningDataModule LightningModule ModelHooks "
    "_load_from_checkpoint=load_from_checkpoint",
    f"{_OWN}.optimizers": "LightningOptimizer _MockOptimizer do_nothing_closure",
    f"{_OWN}.utilities.parameters": "_materialize_meta_tensors _setup_activation_checkpointing find_shared_parameters "
    "from_compiled grad_norm is_overridden is_param_in_hook_signature set_shared_parameters to_uncompiled",
    f"{_OWN}.precision": "DeepSpeedPrecision DeepSpeedPrecisionPlugin=DeepSpeedPrecision "
    "DoublePrecision HalfPrecision MixedPrecision Precision XLAPrecision TPUPrecision=XLAPrecision "
    "TPUPrecisionPlugin=XLAPrecision XLAPrecisionPlugin=XLAPrecision "
    "DoublePrecisionPlugin=DoublePrecision HalfPrecisionPlugin=HalfPrecision "
    "MixedPrecisionPlugin=MixedPrecision PrecisionPlugin=Precision "
    "FSDPMixedPrecisionPlugin=FSDPPrecision FSDPPrecision FSDPPrecisionPlugin=FSDPPrecision",
    f"{_OWN}.callbacks.classes": "ModelCheckpoint ProgressBar RichProgressBar SpikeDetection "
    "StochasticWeightAveraging TQDMProgressBar Timer WeightAveraging",
    f"{_OWN}.callbacks.prediction_writer": "BasePredictionWriter",
    f"{_OWN}.profilers": "AdvancedProfiler Profiler PyTorchProfiler SimpleProfiler",
    f"{_OWN}.callbacks.progress": "Tqdm convert_inf get_standard_metrics",
    f"{_OWN}.utilities.rank_zero": "WarningCache _get_rank=get_rank rank_prefixed_message "
    "rank_zero_debug rank_zero_deprecation "
    "rank_zero_info "
    "rank_zero_only rank_zero_warn",
    f"{_OWN}.utilities.sizes": "apply_to_collection "
    "convert_tensors_to_scalars convert_to_tensors extract_batch_size has_iterable_dataset "
    "has_len "
    "has_len_all_ranks sized_len suggested_max_num_workers DistributedSamplerWrapper UnrepeatedDistributedSampler "
    "UnrepeatedDistributedSamplerWrapper",
    f"{_OWN}.registries": "ACCELERATOR_REGISTRY AcceleratorRegistry=ACCELERATOR_REGISTRY STRATEGY_REGISTRY "
    "StrategyRegistry=STRATEGY_REGISTRY",
    f"{_OWN}.callbacks.summary": "LEFTOVER_PARAMS_NAME LayerSummary NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE "
    "get_formatted_model_size get_human_readable_count parse_batch_shape summarize",
    f"{_OWN}.trainer": "Trainer",
    f"{_OWN}.utilities.type_names": "CollectibleGroup DistributedDataParallel EVAL_DATALOADERS LRSchedulerConfigType "
    "LRSchedulerPLType LRSchedulerType LRSchedulerTypeUnion Optimizable OptimizerConfig OptimizerLRScheduler "
    "OptimizerLRSchedulerConfig TRAIN_DATALOADERS ReduceOp STEP_OUTPUT Steppable _MAP_LOCATION_TYPE _PATH",
    f"{_OWN}.utilities.values": "CHECKPOINT_PAST_HPARAMS_KEYS CONVERSION_DTYPES CPU_DEVICE FLOAT16_EPSILON "
    "FLOAT32_EPSILON "
    "FLOAT64_EPSILON FRAMEWORK_NAME LOCAL_FILE_URI_PREFIX _runif_reasons call_register_accelerators "
    "max_seed_value min_seed_value "
    "cli_lightning_logo",
    f"{_OWN}.utilities.migration": "migrate_checkpoint pl_legacy_patch",
    f"{_OWN}.utilities.combined": "CombinedLoader move_data_to_device",
}  # fmt: skip

# Why names are not supported -> the names.
_ABSENT = {
    "its loops are not classes here: trainer/loop/ has functions of a "
    "run": "AbstractClosure Closure ClosureResult ManualResult OutputResult check_finite_loss prepare_for_backward",
    "it differs in what is cast; pass lw.BitsandbytesPrecision or precision='float8', or convert the module in "
    "configure_model":
    "BitsandbytesPrecision BitsandbytesPrecisionPlugin TransformerEnginePrecision TransformerEnginePrecisionPlugin "
    "TPUBf16Precision TPUBf16PrecisionPlugin XLABf16Precision XLABf16PrecisionPlugin LightningDoublePrecisionModule",
    "Habana's devices are not supported": "HPUAccelerator HPUCheckpointIO HPUParallelStrategy HPUPrecisionPlugin "
    "SingleHPUStrategy",
    "it needs a hosted service that has no public interface here; pass a WandbLogger, MLFlowLogger or CometLogger":
    "LitLogger NeptuneLogger download_model_from_registry find_model_local_ckpt_path",
    "PyTorchProfiler records one window by itself": "RegisterRecordFunction ScheduleWrapper",
    "FSDP is torch's fully_shard here; use fabric.save and fabric.load, or checkpoints of any layout":
    "_get_full_state_dict_context",
    "DeepSpeed's own converter does it: zero_to_fp32.py in its checkpoint folder":
    "DeepSpeedLayerSummary DeepSpeedSummary convert_zero_checkpoint_to_fp32_state_dict deepspeed_param_size "
    "ds_checkpoint_dir remove_module_hooks",
    "demos other than the boring ones are not copied": "Dictionary LightningLSTM LightningTransformer MNIST "
    "MNISTDataModule PositionalEncoding SequenceSampler SimpleLSTM Transformer WikiText2 tokenize "
    "get_torchvision_model",
    "an XLA host is found by its runtime": "XLAEnvironment",
    "there is no server here": "ServableModule ServableModuleValidator",
    "the bar has columns of its own": "BatchesProcessedColumn CustomBarColumn CustomInfiniteTask CustomProgress "
    "CustomTimeColumn MetricsTextColumn ProcessingSpeedColumn",
}  # fmt: skip

# Prefix of a module's path -> names with a different meaning there.
_LOCAL = {
    "fabric.loggers": {
        "CSVLogger": f"{_OWN}.loggers:FabricCSVLogger",
        "TensorBoardLogger": f"{_OWN}.loggers:FabricTensorBoardLogger",
    },
    "pytorch.loggers": {"Logger": f"{_OWN}.loggers:Logger"},
    "fabric.plugins": {"DeepSpeedPrecision": f"{_OWN}.precision:FabricDeepSpeedPrecision"},
    "fabric.strategies": {"ModelParallelStrategy": f"{_OWN}.strategies:FabricModelParallelStrategy"},
    "fabric.utilities": {"ThroughputMonitor": "fabric.throughput:ThroughputMonitor"},
    "pytorch.utilities.model_summary": {"ModelSummary": f"{_OWN}.callbacks.summary:ModelSummary"},
}


def _by_name() -> dict[str, str]:
    table = {}
    for module, names in _HOMES.items():
        for entry in names.split():
            name, _, called = entry.partition("=")
            table[name] = f"{module}:{called or name}"
    for why, names in _ABSENT.items():
        table.update(dict.fromkeys(names.split(), f"!{why}"))
    return table


_BY_NAME = _by_name()


def find_home(place: str, name: str) -> str:
    """Return the home of a name in the module at `place`, which is its path without "lightning."."""
    for beginning, names in _LOCAL.items():
        if name in names and (place == beginning or place.startswith(f"{beginning}.")):
            return names[name]
    return _BY_NAME[name]


def has_home(name: str) -> bool:
    """Return whether a name of Lightning is supported."""
    return name in _BY_NAME


def shown_paths() -> dict[str, list[tuple[str, str, str]]]:
    """Return, by class name here: its home's module, Lightning's name, and where Lightning defines it.

    If a class has several of Lightning's names, the one that equals its name is used, or none.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for place, names in PATHS.items():
        for name in names.split():
            home = "!" if name.startswith("*") else find_home(place, name)
            if not home.startswith("!"):
                found.setdefault(home, {}).setdefault(name, []).append(place)
    shown: dict[str, list[tuple[str, str, str]]] = {}
    for home, served in found.items():
        module, _, own = home.partition(":")
        name = own if own in served else next(iter(served))
        if name == own or len(served) == 1:
            shown.setdefault(own, []).append((module, name, _definition(served[name])))
    return shown


def _definition(places: list[str]) -> str:
    """Return which of the modules that export a name defines it: the deepest.

    pytorch/ imports from fabric/. Where both have a file of one name, each has a class; the Trainer's is the usual one.
    """
    deepest = sorted(places, key=lambda place: (-place.count("."), place))
    of_fabric = next((place for place in deepest if place.startswith("fabric")), None)
    of_trainer = next((place for place in deepest if place.startswith("pytorch")), None)
    if of_fabric is None or (of_trainer and of_trainer.rpartition(".")[2] == of_fabric.rpartition(".")[2]):
        return of_trainer or ""
    return of_fabric
