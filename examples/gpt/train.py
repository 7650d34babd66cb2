"""Train a small GPT on the source of Python's standard library: `make train`, or `python examples/gpt/train.py`.

Run it again after Ctrl-C (or kill -9) to resume where it stopped. The model is in model.py, the text in text.py.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from model import GPT
from text import StandardLibrary

import loopwright as lw

RUN_DIR = Path("runs/gpt")
CHECKPOINTS = RUN_DIR / "checkpoints"
LAST = CHECKPOINTS / "last.ckpt"  # newest checkpoint of an unfinished run
FINAL = RUN_DIR / "final.ckpt"  # written at the end, after the last validation
VALIDATE_EVERY = 200
SAVE_EVERY = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="number of optimizer steps")
    parser.add_argument("--devices", default="1", help="number of devices, or 'auto'")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp, mesh:tp=2,pp=2, ...")
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, bf16-true, ...")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per batch and device")
    parser.add_argument("--accumulate", type=int, default=1, help="number of batches per optimizer step")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, data order and sample")
    parser.add_argument("--fresh", action="store_true", help="delete the previous run and start from scratch")
    parser.add_argument("--prompt", default="def ", help="start of the generated sample")
    return parser.parse_args()


def read(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, or {} if there is none; any script can open one like this."""
    return torch.load(checkpoint, weights_only=True, mmap=True) if checkpoint.exists() else {}


def main() -> None:
    args = parse_arguments()
    lw.seed_everything(args.seed, verbose=False)
    best = lw.ModelCheckpoint(
        dirpath=CHECKPOINTS,
        filename="{step}-{val_loss:.3f}",
        monitor="val_loss",
        save_top_k=2,  # after each validation
    )
    newest = lw.ModelCheckpoint(dirpath=CHECKPOINTS, save_top_k=0, save_last=True, every_n_train_steps=SAVE_EVERY)
    trainer = lw.Trainer(
        max_steps=args.steps,
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        val_check_interval=min(VALIDATE_EVERY, args.steps) * args.accumulate,
        check_val_every_n_epoch=None,  # count batches across epochs
        log_every_n_steps=10,
        callbacks=[best, newest, lw.LearningRateMonitor()],
        # With a fixed version, a resumed run continues in the same folders.
        logger=[
            lw.TensorBoardLogger(RUN_DIR, name="tensorboard", version=0, default_hp_metric=False),
            lw.CSVLogger(RUN_DIR, name="csv", version=0),
        ],
        default_root_dir=RUN_DIR,
    )
    # With several devices this file runs in each process; only rank 0 deletes the previous run.
    if args.fresh and trainer.is_global_zero:
        FINAL.unlink(missing_ok=True)
        for folder in (CHECKPOINTS, RUN_DIR / "tensorboard", RUN_DIR / "csv"):
            shutil.rmtree(folder, ignore_errors=True)

    finished = read(FINAL).get("global_step", 0)
    if finished >= args.steps:
        print(f"The run in {RUN_DIR} has finished its {finished} steps. A higher STEPS= continues, FRESH=1 restarts.")
    else:
        done = read(LAST).get("global_step", 0)
        if done:
            trainer.print(f"Resuming at step {done} of {args.steps}. FRESH=1 restarts.")
        data = StandardLibrary(RUN_DIR, batch_size=args.batch_size)
        trainer.fit(GPT(), datamodule=data, ckpt_path="last" if done else None)
        trainer.save_checkpoint(FINAL)
    if trainer.is_global_zero:
        report(best.state_key, args)


def report(state_key: str, args: argparse.Namespace) -> None:
    """Print the loss of the best model, a sample of its text, and the paths of the results."""
    state = read(FINAL)["callbacks"][state_key]
    path = CHECKPOINTS / Path(state["best_model_path"]).name
    model = GPT.load_from_checkpoint(path, map_location="cpu")
    sample = model.generate(args.prompt.encode(), length=500, seed=args.seed)
    val_loss = float(state["best_model_score"])

    print(
        f"\nBest model: val_loss {val_loss:.4f} nats = {val_loss / math.log(2):.3f} bits per byte, on files never seen"
    )
    print(f"{' What it writes ':-^80}")
    print(sample.decode("utf-8", errors="replace"))
    print(f"{' Where to look ':-^80}")
    print(f"  curves      {sys.executable} -m loopwright report {RUN_DIR}")
    print(f"  or          {sys.executable} -m tensorboard.main --logdir {RUN_DIR}")
    print(f"  numbers     {RUN_DIR / 'csv' / 'version_0' / 'metrics.csv'}")
    print(f"  best model  {path}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to resume from the last checkpoint.")
