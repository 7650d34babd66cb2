"""Logs to TensorBoard and to a tracker of its own, and reads what was written."""

import os

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from record import record, record_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        self.rows.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.rows.append((values, step, kwargs))


def main():
    config = {"lr": 0.05, "num_epochs": 2, "seed": 8, "name": "small", "nested": 3}
    own = ListTracker()
    accelerator = Accelerator(
        cpu=True,
        log_with=["tensorboard", own],
        project_config=ProjectConfiguration(project_dir="project", logging_dir="logs"),
    )
    accelerator.init_trackers("my_run", config)
    set_seed(config["seed"])
    data = TensorDataset(torch.randn(24, 3), torch.randint(2, (24,)))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    overall_step = 0
    for epoch in range(config["num_epochs"]):
        total_loss = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            overall_step += 1
            accelerator.log({"loss": loss.item(), "text": f"step {overall_step}"}, step=overall_step)
        accelerator.log(
            {"train_loss": total_loss.item() / len(loader), "epoch": epoch, "both": {"a": 1.0, "b": epoch}},
            step=epoch,
            log_kwargs={"list": {"why": "end"}},
        )
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    if accelerator.is_main_process:
        writer.add_scalar("direct", 0.5, 1)
        record("own", accelerator.get_tracker("list").name, accelerator.get_tracker("list", unwrap=True) is own.rows)
    record("trackers", [tracker.name for tracker in accelerator.trackers], own.rows)
    record("folders", accelerator.logging_dir, accelerator.project_dir, type(writer).__name__ != "NoneType")
    record_weights(accelerator.unwrap_model(model))
    is_main = accelerator.is_main_process
    accelerator.end_training()
    if is_main:
        events = EventAccumulator(os.path.join("logs", "my_run")).Reload()
        tags = sorted(tag for tag in events.Tags()["scalars"] if "hp_metric" not in tag)
        record("tags", tags)
        for tag in tags:
            record(tag, [[event.step, event.value] for event in events.Scalars(tag)])


if __name__ == "__main__":
    main()
