"""Training data: streams that resume exactly, combined loaders, data modules, and moving batches to devices.

What only several processes need is imported when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import attach
from .combined import CombinedLoader
from .hparams import AttributeDict, HyperParameters, save_hyperparameters, without_omegaconf
from .limit import find_length, resolve_limit
from .module import DataModule
from .move import apply_to_collection, find_batch_size, move_to_device
from .rng import capture_rng, restore_rng
from .stream import BatchStream
from .tree import is_collection

if TYPE_CHECKING:
    from .buckets import BucketBatchSampler, bucket_sizes, pad_to_buckets
    from .distributed.evaluation import EvalShard, count_eval_rounds, in_loader_order, shard_eval
    from .distributed.fingerprint import fingerprint_batch
    from .distributed.shard import NO_BATCH, Shard, is_rank_aware, merge_states
    from .sharded_iterable import ShardedIterable
    from .thread_loader import ThreadDataLoader

__all__ = [
    "NO_BATCH",
    "AttributeDict",
    "BatchStream",
    "BucketBatchSampler",
    "CombinedLoader",
    "DataModule",
    "EvalShard",
    "HyperParameters",
    "Shard",
    "ShardedIterable",
    "ThreadDataLoader",
    "apply_to_collection",
    "bucket_sizes",
    "capture_rng",
    "count_eval_rounds",
    "find_batch_size",
    "find_length",
    "fingerprint_batch",
    "in_loader_order",
    "is_collection",
    "is_rank_aware",
    "merge_states",
    "move_to_device",
    "pad_to_buckets",
    "resolve_limit",
    "restore_rng",
    "save_hyperparameters",
    "shard_eval",
    "without_omegaconf",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "BucketBatchSampler": "buckets",
        "NO_BATCH": "distributed.shard",
        "EvalShard": "distributed.evaluation",
        "Shard": "distributed.shard",
        "ShardedIterable": "sharded_iterable",
        "ThreadDataLoader": "thread_loader",
        "bucket_sizes": "buckets",
        "pad_to_buckets": "buckets",
        "count_eval_rounds": "distributed.evaluation",
        "fingerprint_batch": "distributed.fingerprint",
        "in_loader_order": "distributed.evaluation",
        "is_rank_aware": "distributed.shard",
        "merge_states": "distributed.shard",
        "shard_eval": "distributed.evaluation",
    },
)
