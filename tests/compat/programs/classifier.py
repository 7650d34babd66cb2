"""A classifier with two heads: MetricCollections in three stages, early stopping, two best checkpoints, and resume.

`classifier.py FOLDER` prints what it found as JSON, and leaves its logs and checkpoints in the folder.
"""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics as tm
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(count, seed):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=rng)
    kind = (x[:, :3] * torch.tensor([1.0, 2.0, -1.0])).argmax(1)
    size = (x[:, 3] + 0.3 * torch.randn(count, generator=rng) > 0).long()
    return TensorDataset(x, kind, size)


class TwoHeads(pl.LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.02, weights: tuple = (1.0, 0.5)):
        super().__init__()
        self.save_hyperparameters()
        self.trunk = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, 3), "size": nn.Linear(width, 2)})
        self.loss = nn.CrossEntropyLoss()
        kind = {
            "acc": tm.Accuracy(task="multiclass", num_classes=3),
            "f1": tm.F1Score(task="multiclass", num_classes=3),
        }
        size = {
            "acc": tm.Accuracy(task="multiclass", num_classes=2),
            "auroc": tm.AUROC(task="multiclass", num_classes=2),
        }
        self.metrics = nn.ModuleDict()
        for stage in ("train", "val", "test"):
            for head, one in (("kind", kind), ("size", size)):
                self.metrics[f"{stage}_{head}"] = tm.MetricCollection(one, prefix=f"{stage}/{head}_").clone()
        self.confusion = tm.ConfusionMatrix(task="multiclass", num_classes=3)

    def forward(self, x):
        hidden = self.trunk(x)
        return {name: head(hidden) for name, head in self.heads.items()}

    def _step(self, batch, stage):
        x, kind, size = batch
        targets, out = {"kind": kind, "size": size}, self(x)
        losses = {name: self.loss(out[name], targets[name]) for name in out}
        total = sum(weight * loss for weight, loss in zip(self.hparams.weights, losses.values(), strict=True))
        self.log(f"{stage}/loss", total, prog_bar=True, on_step=stage == "train", on_epoch=True)
        self.log_dict({f"{stage}/loss_{name}": loss for name, loss in losses.items()}, on_step=False, on_epoch=True)
        for name in out:
            metrics = self.metrics[f"{stage}_{name}"]
            metrics.update(out[name].softmax(-1), targets[name])
            self.log_dict(metrics, on_step=False, on_epoch=True)
        return {"loss": total, "logits": out["kind"].detach()}

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self._step(batch, "val")

    def test_step(self, batch, batch_idx):
        found = self._step(batch, "test")
        self.confusion.update(found["logits"], batch[1])

    def on_test_epoch_end(self):
        self.log("test/diagonal", self.confusion.compute().diagonal().sum().float())
        self.confusion.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, nesterov=True)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)
        entry = {"scheduler": plateau, "monitor": "val/kind_acc", "interval": "epoch", "frequency": 1, "strict": True}
        return [optimizer], [entry]


class Record(Callback):
    """Remembers what it saw, and what it was resumed with."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append([trainer.current_epoch, round(outputs["loss"].item(), 4), list(outputs["logits"].shape)])

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append([trainer.global_step, sorted(k for k in trainer.callback_metrics if k.startswith("val"))])

    def state_dict(self):
        return {"seen": len(self.seen)}

    def load_state_dict(self, state_dict):
        self.seen.append(["resumed", state_dict["seen"]])


def make_trainer(folder, epochs):
    stopping = EarlyStopping("val/loss", patience=2, min_delta=0.002, mode="min", check_finite=True)
    best = ModelCheckpoint(
        dirpath=f"{folder}/best", filename="{epoch:02d}-{val/kind_acc:.2f}", monitor="val/kind_acc", mode="max",
        save_top_k=2, auto_insert_metric_name=False, save_last="link",
    )  # fmt: skip
    often = ModelCheckpoint(
        dirpath=f"{folder}/often", every_n_train_steps=10, save_top_k=2, monitor="step", mode="max", filename="{step}"
    )
    record = Record()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        log_every_n_steps=5,
        check_val_every_n_epoch=1,
        logger=CSVLogger(folder, name="heads", version=str(epochs)),
        callbacks=[stopping, best, often, record, LearningRateMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    return trainer, stopping, best, often, record


def summary(trainer, stopping, best, often, record, folder):
    metrics = {k: round(float(v), 5) for k, v in sorted(trainer.callback_metrics.items()) if "SGD" not in k}
    return {
        "metrics": metrics,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "stopped": [stopping.stopped_epoch, stopping.wait_count, round(float(stopping.best_score), 5)],
        "best": [Path(best.best_model_path).name, round(float(best.best_model_score), 5)],
        "kept": sorted(Path(p).name for p in best.best_k_models),
        "often": sorted(Path(p).name for p in often.best_k_models),
        "files": sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if not p.is_dir()),
        "seen": record.seen,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }  # fmt: skip


def main(folder):
    pl.seed_everything(3, workers=True)
    train = DataLoader(make_data(200, 0), batch_size=16)
    val = DataLoader(make_data(70, 1), batch_size=32)
    test = DataLoader(make_data(50, 2), batch_size=32)
    parts = make_trainer(folder, 3)
    model = TwoHeads()
    parts[0].fit(model, train, val)
    found = {"first": summary(*parts, folder)}
    again = make_trainer(folder, 12)
    path = parts[2].best_model_path
    again[0].fit(TwoHeads(lr=0.5), train, val, ckpt_path=path)
    found["resumed"] = summary(*again, folder)
    [result] = again[0].test(ckpt_path="best", dataloaders=test, verbose=False)
    found["test"] = {key: round(value, 5) for key, value in sorted(result.items())}
    [result] = again[0].validate(dataloaders=val, ckpt_path=again[2].best_model_path, verbose=False)
    found["validate"] = {key: round(value, 5) for key, value in sorted(result.items())}
    saved = torch.load(path, weights_only=True)
    found["saved"] = [saved["epoch"], saved["global_step"], sorted(saved["state_dict"])[:4], len(saved["callbacks"])]
    loaded = TwoHeads.load_from_checkpoint(path, width=16, strict=True)
    found["loaded"] = [dict(loaded.hparams)["lr"], loaded.training]
    lines = (Path(folder) / "heads" / "12" / "metrics.csv").read_text().splitlines()
    found["columns"] = sorted(lines[0].split(","))
    found["rows"] = len(lines)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
