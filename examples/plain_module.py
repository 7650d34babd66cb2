"""Train a plain `nn.Module`: it only needs `training_step` and `configure_optimizers`.

The model does not depend on Loopwright: it can be used, saved and tested without it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw


class Line(nn.Module):
    """Fit y = a x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    lw.seed_everything(0, verbose=False)
    x = torch.linspace(-1, 1, 200)[:, None]
    y = 3 * x + 2
    model = Line()
    trainer = lw.Trainer(max_epochs=20, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True))
    print(f"y = {model.layer.weight.item():.3f} x + {model.layer.bias.item():.3f}; it should be y = 3 x + 2")


if __name__ == "__main__":
    main()
