"""Manual optimization with two optimizers: a GAN that learns the distribution of points on a ring, in a few seconds.

With `automatic_optimization = False` the training step runs backward, clipping, stepping and zeroing itself. Loopwright
still moves the data, counts steps, logs, and saves both optimizers in its checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import loopwright as lw

NOISE = 8


class Ring(Dataset[Tensor]):
    """Points near the unit circle; item i is (2,) float32 and depends on i alone."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * torch.rand((), generator=random)
        radius = 1 + 0.05 * torch.randn((), generator=random)
        return torch.stack([radius * angle.cos(), radius * angle.sin()])


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


class RingGAN(lw.Module):
    """A generator that maps noise to points, and a critic that distinguishes them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = network(NOISE, 2)
        self.critic = network(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Return points: (batch, NOISE) -> (batch, 2)."""
        points: Tensor = self.generator(noise)
        return points

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()
        noise = torch.randn(len(batch), NOISE, device=self.device)

        # The critic: above zero for real points, below for generated ones. Gradients of the generator are not needed.
        with self.toggled_optimizer(critic_optimizer):
            real, generated = self.critic(batch), self.critic(self(noise).detach())
            critic_loss = F.softplus(-real).mean() + F.softplus(generated).mean()
            critic_optimizer.zero_grad()
            self.manual_backward(critic_loss)
            critic_optimizer.step()

        # The generator: points that the critic classifies as real.
        with self.toggled_optimizer(generator_optimizer):
            generator_loss = F.softplus(-self.critic(self(noise))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
            self.clip_gradients(generator_optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            generator_optimizer.step()

        self.log_dict({"critic_loss": critic_loss, "generator_loss": generator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        ]


def main() -> None:
    lw.seed_everything(0, verbose=False)
    model = RingGAN()
    trainer = lw.Trainer(max_epochs=20, default_root_dir="runs/gan", enable_checkpointing=False)
    trainer.fit(model, DataLoader(Ring(), batch_size=64, shuffle=True))
    model.eval()
    with torch.no_grad():
        radius = model(torch.randn(1000, NOISE, device=model.device)).norm(dim=1)
    print(f"{trainer.global_step} steps; radius of 1,000 generated points: {radius.mean():.2f} +- {radius.std():.2f}")


if __name__ == "__main__":
    main()
