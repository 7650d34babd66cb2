"""What examples for single features read and call: hooks of saved states, the profiler, trackers' files, streams."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    compare_versions,
    is_bf16_available,
    is_compiled_module,
    is_cuda_available,
    is_torch_version,
    patch_environment,
    set_seed,
    tqdm,
)
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=True),
    dataloader_config=DataLoaderConfiguration(split_batches=True),
    kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir="trace")],
    log_with="tensorboard",
    project_dir="logs",
)
record("state", repr(accelerator.state).replace("cpu:0", "cpu"), repr(accelerator.gradient_state))
record("other engines", accelerator.is_fsdp2, accelerator.state.deepspeed_plugin, accelerator.save_iteration)
set_seed(4)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)


data = TensorDataset(torch.randn(22, 4), torch.randn(22, 1))
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
prepared, optimizer, train, stream = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True), DataLoader(Stream(), batch_size=4)
)
record("same", accelerator.unwrap_model(prepared) is model, prepared is model)
for batch in stream:
    record("stream", batch, accelerator.gradient_state.in_dataloader)
for _ in train:
    for _ in train:
        pass
    record("within itself", accelerator.gradient_state.in_dataloader, accelerator.gradient_state.end_of_dataloader)
for _ in train:  # a loader that was left by `break` stays the active one until a pass over it ends
    for _ in stream:
        break
    record("broken off", accelerator.gradient_state.in_dataloader, accelerator.gradient_state.end_of_dataloader)
record("broken off", accelerator.gradient_state.active_dataloader is stream)
for _ in stream:
    pass
record("nothing left", sum(1 for _ in accelerator.skip_first_batches(train, 50)))

with accelerator.profile() as profiler:
    for x, y in tqdm(train, disable=True):
        with accelerator.accumulate(prepared):
            loss = nn.functional.mse_loss(prepared(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        record("step", loss, accelerator.sync_gradients)
record("profiled", any(event.key == "aten::addmm" for event in profiler.key_averages()), sorted(os.listdir("trace")))
prepared.eval()
with torch.no_grad():
    record("summed", accelerator.reduce(torch.tensor([1.5]), "none"))
    record("evaluated", accelerator.reduce(prepared(x[:1]).sum(), "mean"))
prepared.train()
if accelerator.num_processes > 1:
    with prepared.no_sync():
        accelerator.backward(prepared(x).sum())
    optimizer.optimizer.zero_grad()

calls = []
saving = accelerator.register_save_state_pre_hook(lambda models, weights, folder: calls.append(len(weights)))
loading = accelerator.register_load_state_pre_hook(lambda models, folder: calls.append((len(models), folder)))
accelerator.save_state("hooked")
accelerator.wait_for_everyone()
accelerator.load_state("hooked")
saving.remove()
accelerator.save_state("hooked")
record("hooks", calls)

accelerator.init_trackers("run", {"lr": 0.05, "name": "x"})
accelerator.log({"loss": torch.tensor(1.5), "text": "a", "both": {"a": 1.0, "b": 2.0}}, step=1)
for tracker in accelerator.trackers:
    tracker.writer.add_scalar("more", 1.0, 1)
accelerator.wait_for_everyone()
found = [file for _, _, files in os.walk("logs") for file in files]
record("files", sorted(file.split(".")[0] for file in found), "hparams.yml" in found)
with patch_environment(some_name=1):
    record("environment", os.environ["SOME_NAME"])
record("versions", is_torch_version(">=", "2.0"), compare_versions("torch", "<", "2.0"), "SOME_NAME" in os.environ)
record("there", is_bf16_available(), is_cuda_available(), is_compiled_module(model))
record_weights(accelerator.unwrap_model(prepared))
record("without effect", Accelerator(cpu=True, split_batches=True).split_batches)
accelerator.end_training()
