"""Writes what a program computes, to the last bit, to a file for each process."""

import hashlib
import json
import os
from enum import Enum

import torch


def record(title, *values):
    """Append a line to record_RANK.jsonl."""
    with open(f"record_{os.environ.get('RANK', '0')}.jsonl", "a") as file:
        file.write(json.dumps([title, *map(bits, values)]) + "\n")


def record_weights(model):
    """Append a line with every entry of the model's state."""
    record("weights", dict(model.state_dict()))


def bits(value):
    """Return the value for JSON: floats in hexadecimal, larger tensors as a digest of their bytes."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.numel() <= 4:
            return [str(value.dtype), bits(value.double().tolist() if value.is_floating_point() else value.tolist())]
        digest = hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return [str(value.dtype), list(value.shape), digest[:16]]
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): bits(one) for name, one in value.items()}
    return [bits(one) for one in value]
