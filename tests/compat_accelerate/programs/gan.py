"""Trains a generator and a discriminator with an optimizer and a schedule each, and gradients of two batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import record, record_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(21)
generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)
g_schedule = torch.optim.lr_scheduler.ExponentialLR(g_optimizer, 0.9)
d_schedule = torch.optim.lr_scheduler.StepLR(d_optimizer, 2, 0.5)
loader = DataLoader(TensorDataset(torch.randn(44, 6)), batch_size=4, shuffle=True)
generator, discriminator, g_optimizer, d_optimizer, g_schedule, d_schedule, loader = accelerator.prepare(
    generator, discriminator, g_optimizer, d_optimizer, g_schedule, d_schedule, loader
)
criterion = nn.BCEWithLogitsLoss()
for _epoch in range(2):
    for (real,) in loader:
        noise = torch.randn(len(real), 4, device=accelerator.device)
        with accelerator.accumulate(discriminator):
            fake = generator(noise)
            d_loss = criterion(discriminator(real), torch.ones(len(real), 1))
            d_loss = d_loss + criterion(discriminator(fake.detach()), torch.zeros(len(real), 1))
            accelerator.backward(d_loss)
            d_optimizer.step()
            d_schedule.step()
            d_optimizer.zero_grad()
        with accelerator.accumulate(generator, discriminator):
            g_loss = criterion(discriminator(generator(noise)), torch.ones(len(real), 1))
            accelerator.backward(g_loss)
            g_optimizer.step()
            g_schedule.step()
            g_optimizer.zero_grad()
            d_optimizer.zero_grad()
        record("step", d_loss, g_loss, g_schedule.get_last_lr(), d_schedule.get_last_lr(), accelerator.sync_gradients)
record_weights(accelerator.unwrap_model(generator))
record_weights(accelerator.unwrap_model(discriminator))
record("optimizer", g_optimizer.state_dict()["state"][0], d_optimizer.state_dict()["param_groups"][0]["lr"])
accelerator.end_training()
