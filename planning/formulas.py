"""Closed forms of a training's memory, communication, work, time and cost: estimates with a source, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, nearest

# Tensors of the parameters' shape that an optimizer keeps.
_STATES = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
}
_TRUE_BYTES = {"64": 8, "32": 4, "16": 2, "bf16": 2}
_OF_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes that each trained parameter needs.

    Attributes:
        weight: Bytes of its value.
        gradient: Bytes of its gradient.
        optimizer: Bytes of the optimizer's state, including a float32 copy of the value if it keeps one.
    """

    weight: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all bytes."""
        return self.weight + self.gradient + self.optimizer


def bytes_per_parameter(
    precision: str = "32-true", optimizer: str = "adamw", *, keeps_float32_copy: bool = False
) -> ParameterBytes:
    """Return the bytes per parameter for a precision and an optimizer.

    Args:
        precision: A precision's name, such as "32-true" or "bf16-mixed". Mixed precision keeps parameters in float32.
        optimizer: "adamw", "adam", "nadam", "radam", "adagrad", "rmsprop", "sgd" or "sgd-momentum".
        keeps_float32_copy: Whether parameters have 16 bits and the optimizer keeps float32 copies and states, as in
            DeepSpeed.

    Raises:
        ConfigError: A name is unknown.

    >>> bytes_per_parameter().total, bytes_per_parameter("bf16-mixed").total
    (16, 16)
    >>> bytes_per_parameter("bf16-true").total, bytes_per_parameter("32-true", "sgd").total
    (8, 8)
    >>> bytes_per_parameter("bf16-mixed", keeps_float32_copy=True)
    ParameterBytes(weight=2, gradient=2, optimizer=12)

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.1.
    """
    if optimizer not in _STATES:
        raise ConfigError(
            f"Expected the name of an optimizer whose state is known, got {optimizer!r}{nearest(optimizer, _STATES)}.",
            fix=f"pass one of {', '.join(_STATES)}.",
        )
    bits, _, kind = ("bf16-mixed" if precision in ("float8", "mxfp8") else precision).partition("-")
    if bits not in _TRUE_BYTES or kind not in ("", "true", "mixed"):
        raise ConfigError(
            f"Expected a precision whose bytes are known, got {precision!r}.",
            fix='pass "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true".',
        )
    width = 4 if kind == "mixed" else _TRUE_BYTES[bits]
    if keeps_float32_copy:
        return ParameterBytes(2, 2, 4 + 4 * _STATES[optimizer])
    return ParameterBytes(width, width, width * _STATES[optimizer])


def state_bytes(
    parameters: float, devices: int = 1, *, stage: int = 0, each: ParameterBytes = ParameterBytes(4, 4, 8)
) -> float:
    """Return the bytes of parameters, gradients and optimizer state on each device.

    Args:
        parameters: Number of trained parameters.
        devices: Number of devices to shard over.
        stage: ZeRO stage: 0 shards nothing (DDP), 1 the optimizer state, 2 also gradients, 3 also parameters (FSDP).
        each: Bytes of one parameter.

    >>> [state_bytes(7e9, 4, stage=stage) / 1e9 for stage in range(4)]
    [112.0, 70.0, 49.0, 28.0]
    >>> state_bytes(7e9, 32, stage=3) / 1e9
    3.5

    Source: Rajbhandari et al. 2020 (ZeRO), figure 1.
    """
    shares = [devices if stage >= least else 1 for least in (3, 2, 1)]
    sizes = (each.weight, each.gradient, each.optimizer)
    return sum(parameters * size / share for size, share in zip(sizes, shares, strict=True))


def transformer_activation_bytes(
    tokens: int, width: int, layers: int, *, element_bytes: int = 2, is_checkpointed: bool = False
) -> float:
    """Return the bytes of the activations that a transformer keeps for its backward pass.

    These are 34 bytes per token, channel and layer at 16 bits, and twice as many at 32 bits, without attention scores,
    which fused attention does not store. With checkpointing, they are the input of each layer and one recomputed layer.

    Args:
        tokens: Tokens in a micro-batch: number of sequences times their length.
        width: Width of the hidden states.
        layers: Number of blocks.
        element_bytes: Bytes of one activation element.
        is_checkpointed: Whether each block is recomputed in the backward pass.

    >>> transformer_activation_bytes(2048, 4096, 32) / 2**30
    8.5
    >>> transformer_activation_bytes(2048, 4096, 32, is_checkpointed=True) / 2**30
    0.765625

    Source: Korthikanti et al. 2022, equation 2.
    """
    one = tokens * width * 17 * element_bytes
    return one + layers * tokens * width * element_bytes if is_checkpointed else one * layers


# -- communication ---------------------------------------------------------------------------------------------------


def ring_bytes(size_bytes: float, devices: int, operation: str = "all_reduce") -> float:
    """Return the bytes that each device sends in a ring: (N-1)/N of the data for each half of an all-reduce.

    Args:
        size_bytes: Bytes of the data to reduce, or of the gathered data.
        devices: Number of devices in the ring.
        operation: "all_reduce", or one of its halves, "reduce_scatter" and "all_gather".

    >>> ring_bytes(28e9, 4) / 1e9, ring_bytes(28e9, 4, "all_gather") / 1e9
    (42.0, 21.0)

    Source: Patarasuk and Yuan 2009.
    """
    return _OF_RING[operation] * (devices - 1) / devices * size_bytes


def ring_all_reduce_s(size_bytes: float, devices: int, bytes_per_s: float) -> float:
    """Return the seconds of an all-reduce in a ring: 2 (N-1)/N x D/B, without latencies.

    Args:
        size_bytes: Bytes of the data, D.
        devices: Number of devices, N.
        bytes_per_s: Bandwidth of one device's link in one direction, B.

    >>> ring_all_reduce_s(28e9, 8, 300e9)
    0.16333333333333333

    Source: Patarasuk and Yuan 2009.
    """
    return ring_bytes(size_bytes, devices) / bytes_per_s


def bubble_fraction(stages: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the fraction of a pipeline's time that a rank waits: (P-1)/(V M + P-1).

    Args:
        stages: Number of ranks in the pipeline, P.
        micro_batches: Number of micro-batches in a window, M.
        stages_per_rank: Stages on each rank of an interleaved schedule, V.

    >>> bubble_fraction(4, 4), bubble_fraction(4, 16)
    (0.42857142857142855, 0.15789473684210525)
    >>> bubble_fraction(4, 4, stages_per_rank=2)
    0.2727272727272727

    Source: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021, section 2.2, for interleaved schedules.
    """
    return (stages - 1) / (stages_per_rank * micro_batches + stages - 1)


# -- work, time and cost ---------------------------------------------------------------------------------------------


def dense_flops_per_token(parameters: int) -> int:
    """Return an estimate of the training FLOPs per token of a dense model: 6 N.

    That is 2 for the multiplication and addition of each weight in the forward pass, and 4 in the backward pass.
    Attention scores are not included.

    >>> dense_flops_per_token(7_000_000_000)
    42000000000

    Source: Kaplan et al. 2020, section 2.1.
    """
    return 6 * parameters


def training_flops(parameters: int, tokens: int) -> int:
    """Return the FLOPs of training a dense model with N parameters on D tokens: 6 N D.

    >>> training_flops(7_000_000_000, 140_000_000_000) / 1e15  # in petaFLOPs
    5880000.0

    Source: Kaplan et al. 2020, section 2.1.
    """
    return dense_flops_per_token(parameters) * tokens


def chinchilla_tokens(parameters: int) -> int:
    """Return the compute-optimal number of training tokens for a model of this size: about 20 N.

    >>> chinchilla_tokens(7_000_000_000)
    140000000000

    Source: Hoffmann et al. 2022, table 3.
    """
    return 20 * parameters


def training_hours(flops: float, devices: int, peak_flops: float, mfu: float = 0.4) -> float:
    """Return the hours of a training.

    Args:
        flops: FLOPs of the training, as from `training_flops`.
        devices: Number of devices.
        peak_flops: Peak FLOP/s of one device in the training's precision.
        mfu: Model FLOPs utilization: fraction of the peak that is reached.

    >>> round(training_hours(training_flops(7_000_000_000, 140_000_000_000), 64, 989e12), 1)
    64.5
    """
    return flops / (devices * peak_flops * mfu) / 3600


def training_cost(hours: float, devices: int, price_per_hour: float, *, discount: float = 0.0) -> float:
    """Return the cost of a training in the currency of the price.

    Args:
        hours: Wall-clock hours.
        devices: Number of devices.
        price_per_hour: Price of one device for an hour.
        discount: Discount of spot or preemptible devices, as a fraction; often 0.6 to 0.9.

    >>> training_cost(64.5, 64, 2.5), training_cost(64.5, 64, 2.5, discount=0.75)
    (10320.0, 2580.0)
    """
    return hours * devices * price_per_hour * (1 - discount)


def scaled_lr(lr: float, devices: int, base_devices: int = 1) -> float:
    """Return a learning rate scaled with the global batch, for SGD with a warm-up.

    Args:
        lr: The learning rate that suits `base_devices`.
        devices: Number of devices with the same batch each.
        base_devices: Number of devices that `lr` was chosen for.

    >>> scaled_lr(0.1, 8)
    0.8

    Source: Goyal et al. 2017, section 2.1.
    """
    return lr * devices / base_devices
