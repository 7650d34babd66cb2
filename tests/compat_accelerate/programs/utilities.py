"""Looks for a batch size that fits, logs from all processes, and seeds each of them differently."""

import logging
import os
import random

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import find_executable_batch_size, release_memory, set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__, log_level="INFO")
messages = []


class Kept(logging.Handler):
    def emit(self, line):
        messages.append((line.levelname, line.name, line.getMessage().partition("] ")[2] or line.getMessage()))


logging.getLogger().addHandler(Kept())
accelerator = Accelerator(cpu=True)
set_seed(9)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))


@find_executable_batch_size(starting_batch_size=24)
def inner_training_loop(batch_size, epochs):
    accelerator.free_memory()
    record("try", batch_size)
    if batch_size > 16:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    set_seed(9)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size, shuffle=True))
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            record("step", len(x), loss)
    record_weights(accelerator.unwrap_model(model))
    return batch_size


record("found", inner_training_loop(2))
logger.info("on rank 0 %d", 1)
logger.warning("on all ranks", main_process_only=False)
logger.debug("too quiet")
logger.info("in order", main_process_only=False, in_order=True)
record("messages", messages)
set_seed(100, device_specific=True)
record("random", random.random(), torch.rand(3), os.environ.get("ACCELERATE_LOG_LEVEL"))
a, b = release_memory(torch.ones(3), torch.ones(2))
record("released", a, b)
accelerator.end_training()
