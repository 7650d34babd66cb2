"""A Transformer language model as tutorials show it: a DataModule, warm-up and OneCycleLR by step, text that it writes.

`language_model.py FOLDER` prints what it found as JSON, and leaves its logs and checkpoints in the folder.
"""

import csv
import json
import math
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, random_split

TEXT = "the quick brown fox jumps over the lazy dog and the dog looks at the fox. " * 12


class Characters(Dataset):
    def __init__(self, text, length):
        self.chars = sorted(set(text))
        self.data = torch.tensor([self.chars.index(c) for c in text])
        self.length = length

    def __len__(self):
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index):
        window = self.data[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]


class TextData(L.LightningDataModule):
    def __init__(self, length=16, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        assert len(TEXT) > 100

    def setup(self, stage=None):
        data = Characters(TEXT, self.hparams.length)
        self.vocab_size = len(data.chars)
        parts = [len(data) - 16, 8, 8]
        self.train, self.val, self.test = random_split(data, parts, generator=torch.Generator().manual_seed(7))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=4)


class Positions(nn.Module):
    def __init__(self, width, longest=64):
        super().__init__()
        place = torch.arange(longest)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(1, longest, width)
        table[0, :, 0::2] = torch.sin(place * rate)
        table[0, :, 1::2] = torch.cos(place * rate)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x):
        return x + self.table[:, : x.size(1)]


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size, width=32, heads=2, layers=2, max_lr=3e-3, weight_decay=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab_size, width)
        self.positions = Positions(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.blocks(self.positions(self.embed(tokens)), mask=mask, is_causal=True)))

    def _loss(self, batch):
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_ppl": loss.exp()}, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": self.hparams.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.max_lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "one"}}

    def on_before_optimizer_step(self, optimizer):
        norms = L.pytorch.utilities.grad_norm(self, norm_type=2)
        self.log("grad_norm", norms["grad_2.0_norm_total"])

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def rows(path):
    with open(path) as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def main(folder):
    L.seed_everything(1)
    data = TextData()
    data.prepare_data()
    data.setup("fit")
    model = LanguageModel(data.vocab_size)
    saving = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{step}-{val_loss:.3f}", save_last=True)
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True)
    trainer = L.Trainer(
        default_root_dir=folder,
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=0.5,
        logger=CSVLogger(folder, name="text"),
        log_every_n_steps=1,
        val_check_interval=0.5,
        callbacks=[saving, monitor],
        enable_progress_bar=False,
        deterministic=True,
    )
    trainer.fit(model, datamodule=data)
    found = {k: round(v.item(), 5) for k, v in trainer.callback_metrics.items() if "lr-" not in k and "one" not in k}
    found |= {"steps": trainer.global_step, "epochs": trainer.current_epoch}
    found["estimated"] = trainer.estimated_stepping_batches
    found["best"] = Path(saving.best_model_path).name
    found["test"] = {k: round(v, 5) for k, v in trainer.test(model, datamodule=data, verbose=False)[0].items()}
    guesses = trainer.predict(model, datamodule=data)
    found["guessed"] = [len(guesses), round(torch.cat(guesses).float().mean().item(), 5)]
    best = LanguageModel.load_from_checkpoint(saving.best_model_path).eval()
    found["tied"] = best.head.weight is best.embed.weight
    found["text"] = best.generate(torch.zeros(1, 1, dtype=torch.long), 6).tolist()
    log_dir = Path(trainer.logger.log_dir)
    found["files"] = sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())
    table = rows(log_dir / "metrics.csv")
    found["rates"] = [round(float(row["one/pg1"]), 8) for row in table if "one/pg1" in row]
    found["losses"] = [[int(r["step"]), round(float(r["train_loss_step"]), 4)] for r in table if "train_loss_step" in r]
    found["norms"] = [round(float(r["grad_norm"]), 3) for r in table if "grad_norm" in r]
    found["vals"] = [[int(r["step"]), round(float(r["val_ppl"]), 3)] for r in table if "val_ppl" in r]
    found["columns"] = sorted(set().union(*table))
    found["hparams"] = sorted((log_dir / "hparams.yaml").read_text().split("\n"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
