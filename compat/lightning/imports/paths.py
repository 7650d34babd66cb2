"""The first table: the names in each module of Lightning. homes.py, the second table, has their meanings.

A key is the path without "lightning."; `pytorch_lightning.x` is `pytorch.x`, and `lightning_fabric.x` is `fabric.x`.
`*module` means all other names of an adapter. Modules without names can only be imported. A name can also be imported
from other modules; the listed ones are exported by `*` and shown by `dir`.
"""

from __future__ import annotations

__all__ = ["PATHS"]

PATHS = {
    "": "Callback Fabric LightningDataModule LightningModule Trainer seed_everything",
    "fabric": "Fabric disable_possible_user_warnings is_wrapped package_available seed_everything",
    "fabric.accelerators":
    "ACCELERATOR_REGISTRY Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator TPUAccelerator "
    "XLAAccelerator find_usable_cuda_devices",
    "fabric.accelerators.accelerator": "Accelerator",
    "fabric.accelerators.cpu": "CPUAccelerator",
    "fabric.accelerators.cuda": "CUDAAccelerator find_usable_cuda_devices is_cuda_available num_cuda_devices",
    "fabric.accelerators.mps": "MPSAccelerator",
    "fabric.accelerators.registry": "call_register_accelerators",
    "fabric.accelerators.xla": "XLAAccelerator",
    "fabric.cli": "STRATEGY_REGISTRY",
    "fabric.connector": "ACCELERATOR_REGISTRY STRATEGY_REGISTRY",
    "fabric.fabric": "Fabric",
    "fabric.loggers": "CSVLogger Logger TensorBoardLogger",
    "fabric.loggers.csv_logs": "CSVLogger",
    "fabric.loggers.logger": "Logger rank_zero_experiment",
    "fabric.loggers.tensorboard": "TensorBoardLogger",
    "fabric.plugins":
    "BitsandbytesPrecision CheckpointIO ClusterEnvironment DeepSpeedPrecision DoublePrecision "
    "FSDPPrecision HalfPrecision MixedPrecision Precision TPUBf16Precision TPUPrecision "
    "TorchCheckpointIO TransformerEnginePrecision XLABf16Precision XLACheckpointIO XLAPrecision",
    "fabric.plugins.collectives": "Collective SingleDeviceCollective TorchCollective",
    "fabric.plugins.collectives.collective": "Collective",
    "fabric.plugins.collectives.single_device": "SingleDeviceCollective",
    "fabric.plugins.collectives.torch_collective": "TorchCollective",
    "fabric.plugins.environments":
    "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment "
    "SLURMEnvironment TorchElasticEnvironment XLAEnvironment",
    "fabric.plugins.environments.cluster_environment": "ClusterEnvironment",
    "fabric.plugins.environments.kubeflow": "KubeflowEnvironment",
    "fabric.plugins.environments.lightning": "LightningEnvironment find_free_network_port",
    "fabric.plugins.environments.lsf": "LSFEnvironment",
    "fabric.plugins.environments.mpi": "MPIEnvironment",
    "fabric.plugins.environments.slurm": "SLURMEnvironment",
    "fabric.plugins.environments.torchelastic": "TorchElasticEnvironment",
    "fabric.plugins.environments.xla": "XLAEnvironment",
    "fabric.plugins.io": "CheckpointIO TorchCheckpointIO XLACheckpointIO",
    "fabric.plugins.io.checkpoint_io": "CheckpointIO",
    "fabric.plugins.io.torch_io": "TorchCheckpointIO",
    "fabric.plugins.io.xla": "XLACheckpointIO",
    "fabric.plugins.precision":
    "BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision MixedPrecision "
    "Precision TPUBf16Precision TPUPrecision TransformerEnginePrecision XLABf16Precision XLAPrecision",
    "fabric.plugins.precision.amp": "MixedPrecision",
    "fabric.plugins.precision.bitsandbytes": "BitsandbytesPrecision",
    "fabric.plugins.precision.deepspeed": "DeepSpeedPrecision",
    "fabric.plugins.precision.double": "DoublePrecision",
    "fabric.plugins.precision.fsdp": "FSDPPrecision",
    "fabric.plugins.precision.half": "HalfPrecision",
    "fabric.plugins.precision.precision": "Precision",
    "fabric.plugins.precision.transformer_engine": "TransformerEnginePrecision",
    "fabric.plugins.precision.utils": "",
    "fabric.plugins.precision.xla": "XLAPrecision",
    "fabric.strategies":
    "DDPStrategy DataParallelStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy "
    "ParallelStrategy STRATEGY_REGISTRY SingleDeviceStrategy SingleDeviceXLAStrategy SingleTPUStrategy "
    "Strategy XLAFSDPStrategy XLAStrategy",
    "fabric.strategies.ddp": "DDPStrategy",
    "fabric.strategies.deepspeed": "DeepSpeedStrategy",
    "fabric.strategies.dp": "DataParallelStrategy",
    "fabric.strategies.fsdp": "FSDPStrategy _get_full_state_dict_context _setup_activation_checkpointing",
    "fabric.strategies.launchers": "",
    "fabric.strategies.launchers.launcher": "",
    "fabric.strategies.launchers.multiprocessing": "",
    "fabric.strategies.launchers.subprocess_script": "",
    "fabric.strategies.launchers.xla": "",
    "fabric.strategies.model_parallel": "ModelParallelStrategy",
    "fabric.strategies.parallel": "ParallelStrategy",
    "fabric.strategies.registry": "",
    "fabric.strategies.single_device": "SingleDeviceStrategy",
    "fabric.strategies.single_xla": "SingleDeviceXLAStrategy",
    "fabric.strategies.strategy": "Strategy",
    "fabric.strategies.xla": "XLAStrategy",
    "fabric.strategies.xla_fsdp": "XLAFSDPStrategy",
    "fabric.utilities":
    "AttributeDict LightningEnum Throughput ThroughputMonitor disable_possible_user_warnings "
    "is_shared_filesystem measure_flops move_data_to_device rank_zero_deprecation rank_zero_info "
    "rank_zero_only rank_zero_warn suggested_max_num_workers",
    "fabric.utilities.apply_func":
    "CONVERSION_DTYPES convert_tensors_to_scalars convert_to_tensors move_data_to_device",
    "fabric.utilities.cloud_io": "_is_dir get_filesystem",
    "fabric.utilities.consolidate_checkpoint": "",
    "fabric.utilities.data": "AttributeDict has_iterable_dataset has_len sized_len suggested_max_num_workers",
    "fabric.utilities.device_dtype_mixin": "",
    "fabric.utilities.device_parser": "",
    "fabric.utilities.distributed": "DistributedSamplerWrapper ReduceOp is_shared_filesystem",
    "fabric.utilities.enums": "LightningEnum",
    "fabric.utilities.exceptions": "MisconfigurationException",
    "fabric.utilities.imports": "*utilities.versions",
    "fabric.utilities.init": "_materialize_meta_tensors",
    "fabric.utilities.load": "_NotYetLoadedTensor _lazy_load",
    "fabric.utilities.logger": "",
    "fabric.utilities.optimizer": "",
    "fabric.utilities.rank_zero": "LightningDeprecationWarning rank_zero_only",
    "fabric.utilities.registry": "",
    "fabric.utilities.seed": "max_seed_value min_seed_value pl_worker_init_function reset_seed seed_everything",
    "fabric.utilities.spike": "SpikeDetection TrainingSpikeException",
    "fabric.utilities.testing": "_runif_reasons",
    "fabric.utilities.testing._runif": "_runif_reasons",
    "fabric.utilities.throughput": "Throughput ThroughputMonitor get_available_flops measure_flops",
    "fabric.utilities.types": "CollectibleGroup Optimizable Steppable _MAP_LOCATION_TYPE _PATH *utilities.type_names",
    "fabric.utilities.warnings": "PossibleUserWarning disable_possible_user_warnings",
    "fabric.wrappers": "is_wrapped",
    "pytorch":
    "Callback LightningDataModule LightningModule Trainer cli_lightning_logo "
    "disable_possible_user_warnings module_available seed_everything",
    "pytorch.accelerators":
    "Accelerator AcceleratorRegistry CPUAccelerator CUDAAccelerator HPUAccelerator MPSAccelerator "
    "TPUAccelerator XLAAccelerator find_usable_cuda_devices",
    "pytorch.accelerators.accelerator": "Accelerator",
    "pytorch.accelerators.cpu": "CPUAccelerator get_cpu_stats",
    "pytorch.accelerators.cuda": "CUDAAccelerator get_nvidia_gpu_stats",
    "pytorch.accelerators.mps": "MPSAccelerator get_device_stats",
    "pytorch.accelerators.xla": "XLAAccelerator",
    "pytorch.callbacks":
    "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint "
    "DeviceStatsMonitor EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback "
    "LearningRateFinder LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary "
    "OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar SpikeDetection "
    "StochasticWeightAveraging TQDMProgressBar ThroughputMonitor Timer WeightAveraging",
    "pytorch.callbacks.batch_size_finder": "BatchSizeFinder",
    "pytorch.callbacks.callback": "Callback",
    "pytorch.callbacks.checkpoint": "Checkpoint",
    "pytorch.callbacks.device_stats_monitor": "DeviceStatsMonitor",
    "pytorch.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason",
    "pytorch.callbacks.finetuning": "BackboneFinetuning BaseFinetuning multiplicative",
    "pytorch.callbacks.gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "pytorch.callbacks.lambda_function": "LambdaCallback",
    "pytorch.callbacks.lr_finder": "LearningRateFinder",
    "pytorch.callbacks.lr_monitor": "LearningRateMonitor",
    "pytorch.callbacks.model_checkpoint": "ModelCheckpoint",
    "pytorch.callbacks.model_summary": "ModelSummary",
    "pytorch.callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "pytorch.callbacks.prediction_writer": "BasePredictionWriter WriteInterval",
    "pytorch.callbacks.progress": "ProgressBar RichProgressBar TQDMProgressBar",
    "pytorch.callbacks.progress.progress_bar": "ProgressBar get_standard_metrics",
    "pytorch.callbacks.progress.rich_progress": "RichProgressBar RichProgressBarTheme",
    "pytorch.callbacks.progress.tqdm_progress": "TQDMProgressBar Tqdm convert_inf",
    "pytorch.callbacks.pruning": "ModelPruning",
    "pytorch.callbacks.rich_model_summary": "RichModelSummary",
    "pytorch.callbacks.spike": "SpikeDetection",
    "pytorch.callbacks.stochastic_weight_avg": "StochasticWeightAveraging",
    "pytorch.callbacks.throughput_monitor": "ThroughputMonitor",
    "pytorch.callbacks.timer": "Interval Timer",
    "pytorch.callbacks.weight_averaging": "EMAWeightAveraging WeightAveraging",
    "pytorch.cli":
    "LRSchedulerCallable LRSchedulerTypeTuple LightningArgumentParser LightningCLI OptimizerCallable "
    "ReduceLROnPlateau SaveConfigCallback instantiate_class instantiate_module *cli.lightning_cli",
    "pytorch.core": "LightningDataModule LightningModule",
    "pytorch.core.datamodule": "LightningDataModule",
    "pytorch.core.hooks": "CheckpointHooks DataHooks ModelHooks",
    "pytorch.core.mixins": "HyperparametersMixin",
    "pytorch.core.mixins.hparams_mixin": "HyperparametersMixin",
    "pytorch.core.module": "LightningModule",
    "pytorch.core.optimizer": "LightningOptimizer _MockOptimizer do_nothing_closure",
    "pytorch.core.saving":
    "CHECKPOINT_PAST_HPARAMS_KEYS get_filesystem load_hparams_from_tags_csv load_hparams_from_yaml "
    "save_hparams_to_tags_csv save_hparams_to_yaml update_hparams",
    "pytorch.demos":
    "BoringDataModule BoringModel DemoModel LightningLSTM LightningTransformer SequenceSampler "
    "SimpleLSTM Transformer WikiText2",
    "pytorch.demos.boring_classes":
    "BoringDataModule BoringDataModuleNoLen BoringModel DemoModel IterableBoringDataModule "
    "ManualOptimBoringModel Net RandomDataset RandomDictDataset RandomIterableDataset "
    "RandomIterableDatasetWithLen",
    "pytorch.demos.lstm": "LightningLSTM SequenceSampler SimpleLSTM",
    "pytorch.demos.mnist_datamodule": "MNIST MNISTDataModule",
    "pytorch.demos.transformer": "Dictionary LightningTransformer PositionalEncoding Transformer WikiText2 tokenize",
    "pytorch.loggers": "CSVLogger CometLogger LitLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "pytorch.loggers.comet": "CometLogger FRAMEWORK_NAME",
    "pytorch.loggers.csv_logs": "CSVLogger ExperimentWriter",
    "pytorch.loggers.litlogger": "LitLogger",
    "pytorch.loggers.logger": "DummyExperiment DummyLogger Logger merge_dicts rank_zero_experiment",
    "pytorch.loggers.mlflow": "LOCAL_FILE_URI_PREFIX MLFlowLogger",
    "pytorch.loggers.neptune": "NeptuneLogger",
    "pytorch.loggers.tensorboard": "TensorBoardLogger",
    "pytorch.loggers.utilities": "",
    "pytorch.loggers.wandb": "WandbLogger",
    "pytorch.loops": "",
    "pytorch.loops.evaluation_loop": "RestartStage",
    "pytorch.loops.fetchers": "",
    "pytorch.loops.fit_loop": "RestartStage",
    "pytorch.loops.loop": "",
    "pytorch.loops.optimization": "",
    "pytorch.loops.optimization.automatic": "Closure ClosureResult",
    "pytorch.loops.optimization.closure": "AbstractClosure OutputResult",
    "pytorch.loops.optimization.manual": "ManualResult",
    "pytorch.loops.prediction_loop": "",
    "pytorch.loops.progress": "",
    "pytorch.loops.training_epoch_loop": "RestartStage",
    "pytorch.loops.utilities": "check_finite_loss",
    "pytorch.overrides": "",
    "pytorch.overrides.distributed":
    "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper prepare_for_backward",
    "pytorch.plugins":
    "AsyncCheckpointIO BitsandbytesPrecision BitsandbytesPrecisionPlugin CheckpointIO ClusterEnvironment "
    "DeepSpeedPrecision DeepSpeedPrecisionPlugin DoublePrecision DoublePrecisionPlugin "
    "FSDPMixedPrecisionPlugin FSDPPrecision FSDPPrecisionPlugin HPUCheckpointIO HPUPrecisionPlugin "
    "HalfPrecision HalfPrecisionPlugin LayerSync MixedPrecision MixedPrecisionPlugin Precision "
    "PrecisionPlugin TPUBf16PrecisionPlugin TPUPrecisionPlugin TorchCheckpointIO TorchSyncBatchNorm "
    "TransformerEnginePrecision TransformerEnginePrecisionPlugin XLABf16PrecisionPlugin XLACheckpointIO "
    "XLAPrecision XLAPrecisionPlugin",
    "pytorch.plugins.environments":
    "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment "
    "SLURMEnvironment TorchElasticEnvironment XLAEnvironment",
    "pytorch.plugins.io": "AsyncCheckpointIO CheckpointIO HPUCheckpointIO TorchCheckpointIO XLACheckpointIO",
    "pytorch.plugins.io.async_plugin": "AsyncCheckpointIO",
    "pytorch.plugins.io.checkpoint_plugin": "",
    "pytorch.plugins.io.torch_plugin": "",
    "pytorch.plugins.io.wrapper": "",
    "pytorch.plugins.io.xla_plugin": "",
    "pytorch.plugins.layer_sync": "LayerSync TorchSyncBatchNorm",
    "pytorch.plugins.precision":
    "BitsandbytesPrecision BitsandbytesPrecisionPlugin DeepSpeedPrecision DeepSpeedPrecisionPlugin "
    "DoublePrecision DoublePrecisionPlugin FSDPMixedPrecisionPlugin FSDPPrecision FSDPPrecisionPlugin "
    "HPUPrecisionPlugin HalfPrecision HalfPrecisionPlugin MixedPrecision MixedPrecisionPlugin Precision "
    "PrecisionPlugin TPUBf16PrecisionPlugin TPUPrecisionPlugin TransformerEnginePrecision "
    "TransformerEnginePrecisionPlugin XLABf16PrecisionPlugin XLAPrecision XLAPrecisionPlugin",
    "pytorch.plugins.precision.amp": "MixedPrecision",
    "pytorch.plugins.precision.bitsandbytes": "BitsandbytesPrecision",
    "pytorch.plugins.precision.deepspeed": "DeepSpeedPrecision",
    "pytorch.plugins.precision.double": "DoublePrecision LightningDoublePrecisionModule",
    "pytorch.plugins.precision.fsdp": "FSDPPrecision",
    "pytorch.plugins.precision.half": "HalfPrecision",
    "pytorch.plugins.precision.precision": "Precision",
    "pytorch.plugins.precision.transformer_engine": "TransformerEnginePrecision",
    "pytorch.plugins.precision.xla": "XLAPrecision",
    "pytorch.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler",
    "pytorch.profilers.advanced": "AdvancedProfiler",
    "pytorch.profilers.base": "PassThroughProfiler",
    "pytorch.profilers.profiler": "Profiler",
    "pytorch.profilers.pytorch": "PyTorchProfiler RegisterRecordFunction ScheduleWrapper *utilities.versions",
    "pytorch.profilers.simple": "SimpleProfiler",
    "pytorch.profilers.xla": "XLAProfiler",
    "pytorch.serve": "ServableModule ServableModuleValidator",
    "pytorch.serve.servable_module": "ServableModule",
    "pytorch.serve.servable_module_validator": "ServableModuleValidator",
    "pytorch.strategies":
    "DDPStrategy DeepSpeedStrategy FSDPStrategy HPUParallelStrategy ModelParallelStrategy "
    "ParallelStrategy SingleDeviceStrategy SingleDeviceXLAStrategy SingleHPUStrategy SingleTPUStrategy "
    "Strategy StrategyRegistry XLAStrategy",
    "pytorch.strategies.ddp": "DDPStrategy",
    "pytorch.strategies.deepspeed": "DeepSpeedStrategy remove_module_hooks",
    "pytorch.strategies.fsdp": "FSDPStrategy",
    "pytorch.strategies.launchers": "",
    "pytorch.strategies.launchers.launcher": "",
    "pytorch.strategies.launchers.multiprocessing": "",
    "pytorch.strategies.launchers.subprocess_script": "",
    "pytorch.strategies.launchers.xla": "",
    "pytorch.strategies.model_parallel": "ModelParallelStrategy",
    "pytorch.strategies.parallel": "ParallelStrategy",
    "pytorch.strategies.single_device": "SingleDeviceStrategy",
    "pytorch.strategies.single_xla": "SingleDeviceXLAStrategy",
    "pytorch.strategies.strategy": "Strategy",
    "pytorch.strategies.xla": "XLAStrategy",
    "pytorch.trainer": "Trainer seed_everything",
    "pytorch.trainer.call": "",
    "pytorch.trainer.configuration_validator": "",
    "pytorch.trainer.connectors": "",
    "pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch.trainer.connectors.callback_connector": "_CallbackConnector",
    "pytorch.trainer.connectors.checkpoint_connector": "_CheckpointConnector",
    "pytorch.trainer.connectors.data_connector": "",
    "pytorch.trainer.connectors.logger_connector": "",
    "pytorch.trainer.connectors.logger_connector.fx_validator": "",
    "pytorch.trainer.connectors.logger_connector.logger_connector": "",
    "pytorch.trainer.connectors.logger_connector.result": "_ResultMetric",
    "pytorch.trainer.connectors.signal_connector": "",
    "pytorch.trainer.setup": "",
    "pytorch.trainer.states": "RunningStage TrainerFn TrainerState TrainerStatus",
    "pytorch.trainer.trainer": "Trainer",
    "pytorch.tuner": "Tuner",
    "pytorch.tuner.batch_size_scaling": "",
    "pytorch.tuner.lr_finder": "_LRFinder",
    "pytorch.tuner.tuning": "Tuner",
    "pytorch.utilities":
    "AttributeDict CombinedLoader FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON GradClipAlgorithmType "
    "LightningEnum disable_possible_user_warnings find_shared_parameters grad_norm is_picklable "
    "is_shared_filesystem measure_flops move_data_to_device rank_zero_deprecation rank_zero_info "
    "rank_zero_only rank_zero_warn set_shared_parameters suggested_max_num_workers",
    "pytorch.utilities._pytree": "",
    "pytorch.utilities.argparse": "",
    "pytorch.utilities.cloud_io": "_is_dir get_filesystem",
    "pytorch.utilities.combined_loader": "CombinedLoader",
    "pytorch.utilities.compile": "from_compiled to_uncompiled",
    "pytorch.utilities.consolidate_checkpoint": "",
    "pytorch.utilities.data": "extract_batch_size has_len_all_ranks",
    "pytorch.utilities.deepspeed": "CPU_DEVICE convert_zero_checkpoint_to_fp32_state_dict ds_checkpoint_dir",
    "pytorch.utilities.enums": "GradClipAlgorithmType",
    "pytorch.utilities.exceptions": "MisconfigurationException SIGTERMException",
    "pytorch.utilities.grads": "grad_norm",
    "pytorch.utilities.imports": "*utilities.versions",
    "pytorch.utilities.memory":
    "garbage_collection_cuda is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory "
    "recursive_detach",
    "pytorch.utilities.migration": "migrate_checkpoint pl_legacy_patch",
    "pytorch.utilities.migration.migration": "",
    "pytorch.utilities.migration.utils": "migrate_checkpoint pl_legacy_patch",
    "pytorch.utilities.model_helpers": "get_torchvision_model is_overridden",
    "pytorch.utilities.model_registry": "download_model_from_registry find_model_local_ckpt_path",
    "pytorch.utilities.model_summary":
    "DeepSpeedSummary LayerSummary ModelSummary get_formatted_model_size get_human_readable_count "
    "parse_batch_shape summarize",
    "pytorch.utilities.model_summary.model_summary":
    "LEFTOVER_PARAMS_NAME LayerSummary ModelSummary NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE "
    "get_formatted_model_size get_human_readable_count parse_batch_shape summarize",
    "pytorch.utilities.model_summary.model_summary_deepspeed":
    "DeepSpeedLayerSummary DeepSpeedSummary NOT_APPLICABLE deepspeed_param_size",
    "pytorch.utilities.parameter_tying": "find_shared_parameters set_shared_parameters",
    "pytorch.utilities.parsing":
    "AttributeDict clean_namespace collect_init_args get_init_args is_picklable lightning_getattr "
    "lightning_hasattr lightning_setattr parse_class_init_keys save_hyperparameters",
    "pytorch.utilities.rank_zero": "WarningCache rank_prefixed_message rank_zero_debug rank_zero_only",
    "pytorch.utilities.seed": "isolate_rng",
    "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
    "pytorch.utilities.testing": "_runif_reasons",
    "pytorch.utilities.testing._runif": "_runif_reasons",
    "pytorch.utilities.types":
    "DistributedDataParallel LRSchedulerConfig LRSchedulerConfigType OptimizerConfig "
    "OptimizerLRSchedulerConfig STEP_OUTPUT *utilities.type_names",
    "pytorch.utilities.upgrade_checkpoint": "",
    "pytorch.utilities.warnings": "PossibleUserWarning",
}  # fmt: skip
