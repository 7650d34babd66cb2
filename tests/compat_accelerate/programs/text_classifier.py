"""Trains and evaluates a text classifier: dictionaries of padded tokens, a warm-up, metrics over all processes."""

import argparse

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from record import record, record_weights
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

EVAL_BATCH_SIZE = 8


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 12, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).float()
        logits = self.head((hidden * weights).sum(1) / weights.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if loss is not None else {"logits": logits}


def get_dataloaders(accelerator, batch_size):
    generator = torch.Generator().manual_seed(7)
    with accelerator.main_process_first():
        texts = [torch.randint(1, 50, (int(n),), generator=generator) for n in torch.randint(3, 9, (47,))]
    samples = [{"input_ids": text, "labels": int(text.sum() % 2)} for text in texts]

    def collate_fn(examples):
        max_length = 10 if accelerator.distributed_type == DistributedType.XLA else None
        size = max_length or max(len(one["input_ids"]) for one in examples)
        ids = torch.zeros(len(examples), size, dtype=torch.long)
        for row, one in zip(ids, examples, strict=True):
            row[: len(one["input_ids"])] = one["input_ids"]
        return {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "labels": torch.tensor([one["labels"] for one in examples]),
        }

    train = DataLoader(samples[:32], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True)
    valid = DataLoader(samples[32:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train, valid


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, config["batch_size"])
    model = Classifier().to(accelerator.device)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    optimizer = AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}],
        lr=config["lr"],
    )
    total = len(train_dataloader) * config["num_epochs"]
    lr_scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4) * max(0.0, 1 - n / total))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    record("lengths", len(train_dataloader), len(eval_dataloader), train_dataloader.total_batch_size)
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            batch.to(accelerator.device) if hasattr(batch, "to") else None
            outputs = model(**batch)
            loss = outputs["loss"]
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            record("train", loss, lr_scheduler.get_last_lr())
        model.eval()
        right, seen, losses = 0, 0, []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics(
                (outputs["logits"].argmax(dim=-1), batch["labels"])
            )
            losses.append(accelerator.gather_for_metrics(outputs["loss"].repeat(EVAL_BATCH_SIZE)))
            right += int((predictions == references).sum())
            seen += len(references)
        accelerator.print(f"epoch {epoch}:", right / seen)
        record("eval", right / seen, seen, torch.cat(losses).mean(), [len(one) for one in losses])
    record_weights(accelerator.unwrap_model(model))
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 4}, parser.parse_args())


if __name__ == "__main__":
    main()
