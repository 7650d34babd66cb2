"""Accelerate's modules and names: where each name lives here, and which are refused."""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["HOMES", "MODULES", "REFUSED", "VERSION"]

VERSION = "1.15.0"
"""The version whose names and behavior the layer follows."""

_PLACES = """
accelerator big_modeling checkpointing data_loader hooks inference launchers local_sgd logging memory_utils optimizer
parallelism_config scheduler state tracking utils utils.constants utils.dataclasses utils.deepspeed utils.environment
utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling utils.offload
utils.operations utils.other utils.random utils.tqdm utils.versions
"""
MODULES = frozenset(["accelerate", *(f"accelerate.{place}" for place in _PLACES.split())])

# A line for each file here: its names.
_FILES = """
accelerator Accelerator
configuration AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs
configuration DistributedType GradScalerKwargs GradientAccumulationPlugin
configuration InitProcessGroupKwargs KwargsHandler LoggerType ProjectConfiguration
loaders BatchSamplerShard SkipBatchSampler DataLoaderDispatcher DataLoaderShard SeedableRandomSampler skip_first_batches
operations broadcast broadcast_object_list concatenate convert_to_fp32 extract_model_from_parallel find_batch_size
operations gather gather_object pad_across_processes reduce send_to_device slice_tensors
optimizers AcceleratedOptimizer AcceleratedScheduler
processes find_executable_batch_size get_logger release_memory set_seed synchronize_rng_states
saved_states save
state AcceleratorState GradientState PartialState is_initialized wait_for_everyone
trackers GeneralTracker TensorBoardTracker WandBTracker on_main_process
"""
_LINES = [line.split() for line in _FILES.strip().splitlines()]
HOMES = MappingProxyType({name: file for file, *names in _LINES for name in names})

# Names, and what to use instead.
_REFUSED = """
AlignDevicesHook ModelHook SequentialHook CpuOffload UserCpuOffloadHook add_hook_to_module attach_align_device_hook
attach_align_device_hook_on_blocks attach_execution_device_hook cpu_offload cpu_offload_with_hook disk_offload
dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model
infer_auto_device_map get_balanced_memory get_max_memory get_max_layer_size clean_device_map offload_weight
offload_state_dict load_offloaded_weight load_offloaded_weights OffloadedWeightsLoader PrefixedDataset
align_module_device has_offloaded_params named_module_tensors remove_hook_from_module remove_hook_from_submodules
set_module_tensor_to_device compute_module_sizes find_tied_parameters retie_parameters load_state_dict
save_offload_index extract_submodules_state_dict check_tied_parameters_in_config check_tied_parameters_on_same_device
: build the model in lw.Fabric(strategy='fsdp').init_module(), or run the program with Accelerate itself
prepare_pippy: use lw.Fabric(strategy='mesh:pp=2')
LocalSGD: use lw.Fabric(strategy=lw.DDPStrategy(ddp_comm_hook='post_local_sgd', model_averaging_period=8))
DeepSpeedPlugin DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
HfDeepSpeedConfig get_active_deepspeed_plugin: use lw.Fabric(strategy='deepspeed_stage_2')
MegatronLMPlugin MegatronEngine AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronLMDummyDataLoader
MegatronLMDummyScheduler ParallelismConfig TorchTensorParallelPlugin TorchTensorParallelConfig
TorchContextParallelConfig DeepSpeedSequenceParallelConfig: use lw.Fabric(strategy='mesh:fsdp=2,tp=2')
FP8RecipeKwargs AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs: use mixed_precision='bf16'
BnbQuantizationConfig load_and_quantize_model: quantize the model with bitsandbytes itself
TorchDynamoPlugin DynamoBackend compile_regions: call torch.compile(model) before prepare
AimTracker ClearMLTracker CometMLTracker DVCLiveTracker MLflowTracker SwanLabTracker TrackioTracker
: pass a GeneralTracker of the program to log_with
save_fsdp_model load_fsdp_model save_fsdp_optimizer load_fsdp_optimizer fsdp2_load_full_state_dict
: use accelerator.save_state() and load_state()
merge_fsdp_weights: use `loopwright checkpoint consolidate`
write_basic_config load_config_from_file: use `loopwright launch --ask`
debug_launcher notebook_launcher
: run a script under `loopwright run-accelerate --num-processes 2`, or use lw.Fabric(strategy='ddp_notebook')
tqdm: use tqdm.auto.tqdm with disable=not accelerator.is_local_main_process
IterableDatasetShard: leave dispatch_batches at None
FullyShardedDataParallelPlugin: use lw.Fabric(strategy=lw.FSDPStrategy(...))
StatefulDataLoader: use accelerator.skip_first_batches()
ProfileKwargs: use torch.profiler.profile() around the block
DDPCommunicationHookType: use lw.Fabric(strategy=lw.DDPStrategy(ddp_comm_hook='fp16'))
PrecisionType: pass mixed_precision as a string
"""


def _parse() -> dict[str, str]:
    refused: dict[str, str] = {}
    names = ""
    for line in _REFUSED.strip().splitlines():
        before, colon, instead = line.partition(": ")
        names += f" {before}"
        if colon:
            refused |= dict.fromkeys(names.split(), instead)
            names = ""
    return refused


REFUSED = MappingProxyType(_parse())
