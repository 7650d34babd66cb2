"""A step beside other trainers, in their environment: `make bench-peers`. All must train the same weights.

This file is also the program that is measured: `.venv-peers/bin/python benchmarks/peers_steps.py 600 5`. All trainers
take turns in one process, with everything off that can be, so that a slow moment of the machine meets each of them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tables import table

__all__ = ["describe_peers", "measure_peers"]

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


def measure_peers(*, num_batches: int, rounds: int, python: Path = PYTHON) -> dict[str, Any]:
    """Return the versions, and a row for each trainer that the environment of the peers has; or that it is missing.

    Args:
        num_batches: Steps of each run.
        rounds: Turns.
        python: Of that environment.
    """
    if not python.is_file():
        return {"missing": "There is no .venv-peers, the environment with the other trainers: `make bench-peers`."}
    command = [str(python), __file__, str(num_batches), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the peers could not be measured:\n{done.stderr}")
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def describe_peers(numbers: dict[str, Any]) -> list[str]:
    """Return the section of RESULTS.md."""
    if "missing" in numbers:
        return ["## A step beside other trainers", f"Not measured. {numbers['missing']}"]
    rows = numbers["rows"]
    different = [row["name"] for row in rows if not row["weights_equal"]]
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    return [
        "## A step beside other trainers",
        "The step of the first table, in the peers' environment "
        f"(`make bench-peers`; {versions}): everything is off that can be, "
        "and all take turns in one process. Microseconds of CPU time per batch: the 10th percentile over single "
        "batches, and the median.",
        table(
            ("", "10th percentile", "added", "median", "added"),
            (
                (
                    row["name"],
                    f"{row['low_us']:.0f}",
                    f"**{row['low_us'] - rows[0]['low_us']:+.0f}**",
                    f"{row['median_us']:.0f}",
                    f"**{row['median_us'] - rows[0]['median_us']:+.0f}**",
                )
                for row in rows
            ),
        ),
        "The final weights equal those of the hand-written loop, bit for bit"
        + (f", EXCEPT in: {', '.join(different)}." if different else "."),
    ]


# --- the program that is measured -----------------------------------------------------------------------------------


def _ways() -> dict[str, Callable[[Any, Any], None]]:
    """Return how each trainer trains: (toy, batches) -> None. The handwritten loop is the first."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from toy import train_by_hand
    from variants import OFF

    import loopwright as lw

    class Plain(nn.Module):
        """The toy as a plain module, which notes when its forward pass begins."""

        def __init__(self, toy: Any) -> None:
            super().__init__()
            self.net = toy.net
            self.began_s = toy.began_s

        def forward(self, x: Any, y: Any = None) -> Any:
            self.began_s.append(time.process_time())
            return self.net(x) if y is None else {"loss": F.mse_loss(self.net(x), y)}

    class Batches:
        """Batches in memory that no library takes for a collection of loaders."""

        def __init__(self, items: list[Any]) -> None:
            self.items = items

        def __len__(self) -> int:
            return len(self.items)

        def __iter__(self) -> Any:
            return iter(self.items)

    def trainer(toy: Any, data: Any) -> None:
        lw.Trainer(max_epochs=1, accelerator="cpu", devices=1, **OFF).fit(toy, data)  # type: ignore[arg-type]

    def with_fabric(fabric: Any, toy: Any, data: Any) -> None:
        model, optimizer = fabric.setup(Plain(toy), toy.configure_optimizers())
        model.train()
        for x, y in data:
            loss = model(x, y)["loss"]
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

    ways: dict[str, Callable[[Any, Any], None]] = {
        "hand-written loop": train_by_hand,
        "Loopwright, Trainer": trainer,
        "Loopwright, Fabric": lambda toy, data: with_fabric(lw.Fabric(accelerator="cpu", devices=1), toy, data),
    }
    try:
        lightning: Any = import_module("lightning")  # Any: not in the environment of developers
    except ImportError:
        pass
    else:
        base: Any = lightning.LightningModule

        class OfLightning(base):  # type: ignore[misc]
            def __init__(self, toy: Any) -> None:
                super().__init__()
                self.plain = Plain(toy)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x, y = batch
                return self.plain(x, y)["loss"]

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        ways["Lightning, Fabric"] = lambda toy, data: with_fabric(
            lightning.Fabric(accelerator="cpu", devices=1), toy, data
        )
        ways["Lightning, Trainer"] = lambda toy, data: lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, **OFF
        ).fit(OfLightning(toy), Batches(data))
    try:
        accelerator_class: Any = import_module("accelerate").Accelerator
    except ImportError:
        pass
    else:

        def accelerate(toy: Any, data: Any) -> None:
            accelerator = accelerator_class(cpu=True)
            model, optimizer = accelerator.prepare(Plain(toy), toy.configure_optimizers())
            model.train()
            for x, y in data:
                loss = model(x, y)["loss"]
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()

        ways["Accelerate"] = accelerate
    try:
        create_supervised_trainer: Any = import_module("ignite.engine").create_supervised_trainer
    except ImportError:
        pass
    else:
        ways["ignite"] = lambda toy, data: create_supervised_trainer(
            Plain(toy), toy.configure_optimizers(), F.mse_loss
        ).run(data, max_epochs=1)  # fmt: skip
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        pass
    else:

        def hugging_face(toy: Any, data: Any) -> None:
            trainer_class: Any = transformers.Trainer

            class OfList(trainer_class):  # type: ignore[misc]
                def get_train_dataloader(self) -> Any:
                    return Batches([{"x": x, "y": y} for x, y in data])

            with tempfile.TemporaryDirectory() as folder:
                arguments = transformers.TrainingArguments(
                    output_dir=folder, use_cpu=True, max_steps=len(data), report_to=[], save_strategy="no",
                    logging_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
                )  # fmt: skip
                optimizer = toy.configure_optimizers()
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
                OfList(
                    model=Plain(toy), args=arguments, train_dataset=data, optimizers=(optimizer, schedule)
                ).train()  # fmt: skip

        ways["Trainer of transformers"] = hugging_face
    return ways


def main() -> None:
    """Train with each in turns, and print what a step took."""
    import logging
    from importlib.metadata import PackageNotFoundError, version

    import torch
    from steps import differences, percentile, same_weights
    from toy import Toy, batches, make
    from variants import quiet

    torch.set_num_threads(1)
    num_batches, rounds = int(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.WARNING)
    ways = _ways()
    chunks: dict[str, list[list[float]]] = {name: [] for name in ways}
    trained: dict[str, Any] = {}
    for _ in range(rounds):
        for name, train in ways.items():
            toy, data = make(Toy), batches(num_batches)
            gc.collect()
            with quiet():
                train(toy, data)
            chunks[name].append(differences(toy.began_s))
            trained[name] = toy
    rows = []
    for name, found in chunks.items():
        values = [1e6 * value for value in itertools.chain(*found)]
        rows.append(
            {
                "name": name,
                "low_us": percentile(values, 0.1),
                "median_us": percentile(values, 0.5),
                "weights_equal": same_weights(trained["hand-written loop"], trained[name]),
            }
        )
    versions = {}
    for package in ("lightning", "accelerate", "transformers", "pytorch-ignite"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    print(json.dumps({"rows": rows, "versions": versions}))


if __name__ == "__main__":
    main()
