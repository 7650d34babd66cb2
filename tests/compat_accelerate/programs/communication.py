"""Gradients that are compressed on their way to the other processes."""

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from record import record, record_weights

settings = DistributedDataParallelKwargs(
    comm_hook=DDPCommunicationHookType.POWER_SGD,
    comm_wrapper=DDPCommunicationHookType("fp16"),
    comm_state_option={"matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
)
accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
set_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
generator = torch.Generator().manual_seed(accelerator.process_index)
for _ in range(6):
    loss = model(torch.randn(8, 40, generator=generator)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    record("loss", loss)
record_weights(accelerator.unwrap_model(model))
accelerator.end_training()
