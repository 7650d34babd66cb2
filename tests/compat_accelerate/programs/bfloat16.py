"""Computes in bfloat16, also with losses of its own under autocast, and writes weights."""

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=True)]
accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
set_seed(4)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU())
        self.head = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.body(x)
        return {"hidden": hidden, "logits": self.head(hidden)}


model = Two()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
data = TensorDataset(torch.randn(40, 6), torch.randint(4, (40,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
for x, y in loader:
    out = model(x)
    with accelerator.autocast():
        product = out["hidden"] @ out["hidden"].T
        loss = nn.functional.cross_entropy(out["logits"], y) + 0.01 * product.mean()
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        exact = out["hidden"] @ out["hidden"].T
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    record("step", loss, norm, str(out["logits"].dtype), str(product.dtype), str(exact.dtype))
    record("skipped", accelerator.optimizer_step_was_skipped, accelerator.mixed_precision)
plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
record("plain", str(plain(torch.ones(2, 6))["logits"].dtype), type(plain).__name__)
record("state", accelerator.get_state_dict(model))
accelerator.save(accelerator.get_state_dict(model), "weights.pt")
accelerator.wait_for_everyone()
record("file", torch.load("weights.pt", weights_only=True))
record_weights(plain)
accelerator.end_training()
