"""Lightning's command line: links, an optimizer with arguments, defaults, and its own callback for the configuration.

With SUBCLASS=1, model and data are named by the user.
"""

import json
import os
import sys

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from torch.utils.data import DataLoader, TensorDataset

SUBCLASS = os.environ.get("SUBCLASS") == "1"


class Data(LightningDataModule):
    """Points of a line."""

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
        self.num_features = 1

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 16)[:, None]
        return DataLoader(TensorDataset(x, 2 * x), batch_size=self.batch_size)

    val_dataloader = train_dataloader
    test_dataloader = train_dataloader


class Line(LightningModule):
    """A line, bent by an activation that settings name."""

    def __init__(
        self,
        batch_size: int = 1,
        width: int = 1,
        activation: torch.nn.Module = torch.nn.Identity(),  # noqa: B008
        lr: float = 0.1,
    ):
        super().__init__()
        self.save_hyperparameters(ignore="activation")
        self.activation = activation
        self.layer = torch.nn.Linear(width, 1)

    def _loss(self, batch):
        return torch.nn.functional.mse_loss(self.activation(self.layer(batch[0])), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))


class Save(SaveConfigCallback):
    """Says what it is given."""

    def save_config(self, trainer, pl_module, stage):
        name = getattr(stage, "value", stage)
        text = self.parser.dump(self.config, skip_none=False)
        sys.stderr.write(f"saved in {name}: {'gamma' in text}, {self.config.get('trainer.max_epochs')}\n")


class CLI(LightningCLI):
    """A program's own."""

    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.SGD)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
        parser.set_defaults({"optimizer.lr": 0.3, "lr_scheduler.gamma": 0.9})
        parser.add_argument("--tag", type=str, default="none")
        if not SUBCLASS:
            parser.link_arguments("data.batch_size", "model.batch_size")
            parser.link_arguments("data.num_features", "model.width", apply_on="instantiate")

    @staticmethod
    def configure_optimizers(lightning_module, optimizer, lr_scheduler=None):
        return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]

    def after_fit(self):
        logged = self.trainer.callback_metrics
        found = {
            "loss": logged["loss"].item(),
            "val_loss": logged["val_loss"].item(),
            "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            "momentum": self.trainer.optimizers[0].param_groups[0]["momentum"],
            "epochs": self.trainer.current_epoch,
            "batch_size": self.model.hparams.batch_size,
            "activation": type(self.model.activation).__name__,
            "tag": self.config.fit.tag,
            "max_epochs": self.config["fit"]["trainer"]["max_epochs"],
            "config": "mine.yaml" in os.listdir(self.trainer.log_dir),
        }
        self.trainer.save_checkpoint("last.ckpt")
        print(json.dumps(found))

    def after_test(self):
        print(json.dumps({"test_loss": self.trainer.callback_metrics["test_loss"].item()}))


if __name__ == "__main__":
    CLI(
        LightningModule if SUBCLASS else Line,
        LightningDataModule if SUBCLASS else Data,
        subclass_mode_model=SUBCLASS,
        subclass_mode_data=SUBCLASS,
        save_config_callback=Save,
        save_config_kwargs={"config_filename": "mine.yaml"},
        seed_everything_default=3,
        trainer_defaults={
            "max_epochs": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    )
