"""optuna-integration: a callback that ends trials of a search, which are worse than those before."""

import json
import warnings

import lightning as L
import optuna
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from optuna_integration import PyTorchLightningPruningCallback

warnings.filterwarnings("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Model(BoringModel):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"] * (1 + self.lr))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def objective(trial: optuna.Trial) -> float:
    L.seed_everything(1)
    trainer = L.Trainer(
        max_epochs=5,
        limit_train_batches=4,
        limit_val_batches=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_loss")],
    )
    trainer.fit(Model(trial.suggest_float("lr", 1e-3, 1.0, log=True)))
    return trainer.callback_metrics["val_loss"].item()


pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner)
study.optimize(objective, n_trials=8)
print(json.dumps({"trials": [[trial.state.name, trial.value, trial.last_step] for trial in study.trials]}))
