"""Trains an image classifier with a one-cycle schedule, saves each epoch's state, and trains on from one of them."""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from record import record, record_weights
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 8, 8, generator=generator) + torch.rand(3, 1, 1)  # augmented
        return {"image": image, "label": index % 3}


def main():
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), project_dir="project"
    )
    set_seed(11)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(24, 3),
    )  # fmt: skip
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    train = DataLoader(Pictures(45), shuffle=True, batch_size=4, num_workers=0)
    valid = DataLoader(Pictures(21), batch_size=6)
    mean = torch.tensor([0.9, 1.0, 1.1])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1 / 25)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(train))
    model, optimizer, train, valid, lr_scheduler = accelerator.prepare(model, optimizer, train, valid, lr_scheduler)

    def train_on(loader, epoch):
        model.train()
        for step, batch in enumerate(loader):
            inputs = batch["image"] - mean
            loss = nn.functional.cross_entropy(model(inputs), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            record("train", epoch, step, loss, lr_scheduler.get_last_lr(), optimizer.param_groups[0]["betas"])
            if epoch == 0 and step == 2:
                accelerator.save_state(os.path.join("states", "step_3"))

    for epoch in range(2):
        train_on(train, epoch)
        model.eval()
        accurate = 0
        num_elems = 0
        for batch in valid:
            with torch.no_grad():
                predictions = model(batch["image"] - mean).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        record("eval", accurate.item() / num_elems, num_elems)
    record_weights(accelerator.unwrap_model(model))
    accelerator.load_state(os.path.join("states", "step_3"))
    train.set_epoch(0)
    train_on(accelerator.skip_first_batches(train, 3), 1)
    accelerator.wait_for_everyone()
    record_weights(accelerator.unwrap_model(model))
    accelerator.save_model(model, "model")
    accelerator.wait_for_everyone()
    record("files", sorted(os.listdir("model")))
    accelerator.end_training()


if __name__ == "__main__":
    main()
