"""Runs of DeepSpeed's PipelineModule, compared with one process; for tests/integration/deepspeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import DeepSpeedStrategy

__all__ = ["Trained", "batch", "check_fabric", "check_trainer", "fabric_of", "fit", "layers", "pipe"]


def layers(*, has_norm: bool = True) -> list[nn.Module]:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8) if has_norm else nn.Tanh()
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), norm, nn.Linear(8, 4), nn.Linear(4, 3)]


def batch(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def pipe(stages: int, **changes: Any) -> Any:
    from deepspeed.pipe import PipelineModule

    arguments = {"loss_fn": nn.functional.mse_loss, "partition_method": "uniform", **changes}
    return PipelineModule(arguments.pop("layers", None) or layers(), num_stages=stages, **arguments)


def fabric_of(size: int, stage: int, **changes: Any) -> lw.Fabric:
    precision = changes.pop("precision", None)
    strategy = DeepSpeedStrategy(stage=stage, **changes)
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


# --- Fabric ---------------------------------------------------------------------------------------------------------


def train_by_hand(steps: int, *, replicas: int = 1, file: str | None = None) -> dict[str, Any]:
    """Train the same layers in a plain loop, with the micro-batches of the pipeline, of which norms see each alone."""
    net = nn.Sequential(*layers())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses, norms = [], []
    for number in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            x, y = batch(number * replicas + replica)
            for part in range(2):
                loss = nn.functional.mse_loss(net(x[part * 4 : part * 4 + 4]), y[part * 4 : part * 4 + 4])
                (loss / 2 / replicas).backward()
                total += loss.item() / 2 if replica == 0 else 0.0
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        losses.append(total)
        if file is not None and number == 1:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    net.eval()
    with torch.no_grad():
        x, y = batch(99)
        outputs = net(x)
        evaluated = nn.functional.mse_loss(outputs, y).item()
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "outputs": outputs, "state": net.state_dict()}


def steps(fabric: lw.Fabric, model: Any, optimizer: Any, numbers: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    topology = fabric.strategy.topology
    for number in numbers:
        loss = model.train_batch(batch(number * topology.data_size + topology.data_rank))
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def train_in_fabric(rank: int, size: int, folder: str, stages: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rank == 0:
        found["wanted"] = train_by_hand(4, replicas=size // stages, file=f"{folder}/hand.ckpt")
    for stage in (0, 1):
        fabric = fabric_of(size, stage)
        net = pipe(stages)
        model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
        losses, norms = steps(fabric, model, optimizer, range(2))
        fabric.save(f"{folder}/{stage}.ckpt", {"model": model, "optimizer": optimizer, "steps": 2})
        more, more_norms = steps(fabric, model, optimizer, range(2, 4))
        net.eval()
        evaluated = model.eval_batch(batch(99)).item()
        assert not net.training
        net.train()
        model.eval_batch(batch(99, size=5))  # cannot be cut in two; and the norm's statistics stay
        assert net.training
        with torch.no_grad():
            assert torch.equal(model(batch(99)[0]), model.predict_batch(batch(99)[0]))
        found[stage, "outputs"] = model.predict_batch(batch(99)[0])
        found[stage] = (losses + more, norms + more_norms, evaluated)
        fabric.save(f"{folder}/{stage}-4.ckpt", {"model": model})
        places = [f"{one}.ckpt" for one in range(stage + 1)] + ["hand.ckpt"] * (size == stages)
        for place in places:
            fabric.load(f"{folder}/{place}", {"model": model, "optimizer": optimizer})
            found[stage, place] = steps(fabric, model, optimizer, range(2, 4))[0]
        if size == stages:
            found[stage, "accumulated"] = accumulate(fabric, model, optimizer)
            found[stage, "iterated"] = model.train_batch(iter([batch(1, 4), batch(2, 4)])).item()
    found["bf16"] = train_in_16_bits(size, stages, folder)
    return found


def train_in_16_bits(size: int, stages: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Return the losses and norms of four steps, and the losses after resuming in the middle."""
    fabric = fabric_of(size, 0, precision="bf16-mixed")
    net = pipe(stages)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    losses, norms = steps(fabric, model, optimizer, range(2))
    fabric.save(f"{folder}/bf16.ckpt", {"model": model, "optimizer": optimizer})
    more, more_norms = steps(fabric, model, optimizer, range(2, 4))
    fabric.load(f"{folder}/bf16.ckpt", {"model": model, "optimizer": optimizer})
    return losses + more, norms + more_norms, steps(fabric, model, optimizer, range(2, 4))[0]


def accumulate(fabric: lw.Fabric, model: Any, optimizer: Any) -> tuple[float, float]:
    """Return the norms of the gradients of two batches with weights 1 and 3: accumulated, and by hand."""
    optimizer.zero_grad()
    net = nn.Sequential(*layers(has_norm=False))
    pipeline = pipe(2, layers=layers(has_norm=False))
    model, optimizer = fabric.setup(pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.1))
    with fabric.no_backward_sync(model):
        fabric.backward(model.train_batch(batch(1)) * 0.25)
    penalty = sum(one.square().sum() for one in pipeline.parameters())
    fabric.backward(model.train_batch(batch(2)) * 0.75 + 0.1 * penalty)
    norm = fabric.clip_gradients(model, optimizer, max_norm=100.0).item()
    x, y = batch(1)
    (nn.functional.mse_loss(net(x), y) * 0.25).backward()
    x, y = batch(2)
    penalty = sum(one.square().sum() for one in net.parameters())
    (nn.functional.mse_loss(net(x), y) * 0.75 + 0.1 * penalty).backward()
    return norm, nn.utils.clip_grad_norm_(net.parameters(), 100.0).item()


def check_fabric(size: int, stages: int, tmp_path: Path) -> None:
    """Train with Fabric on `size` ranks, and compare with a loop."""
    results = run_ranks(train_in_fabric, size, str(tmp_path), stages, connect=False, timeout_s=60)
    wanted = results[0]["wanted"]
    for found in results:
        replica = 0 if found is results[0] else None
        for stage in (0, 1):
            losses, norms, evaluated = found[stage]
            # Sums of gradients in another order: micro-batches are divided first, replicas are averaged.
            assert norms == pytest.approx(wanted["norms"], rel=1e-5)
            if size == stages:
                assert evaluated == pytest.approx(wanted["evaluated"], rel=1e-5)
                assert torch.allclose(found[stage, "outputs"], wanted["outputs"], atol=1e-5)
            if replica == 0:
                assert losses == pytest.approx(wanted["losses"], rel=1e-5)
            assert found[stage, f"{stage}.ckpt"] == losses[2:]  # to the bit
            assert found[1, "0.ckpt"] == pytest.approx(losses[2:], rel=1e-5)
            if size == stages:
                assert found[stage, "hand.ckpt"] == pytest.approx(losses[2:], rel=1e-5)
                assert found[stage, "accumulated"][0] == pytest.approx(found[stage, "accumulated"][1], rel=1e-5)
                assert found[stage, "iterated"] > 0
        losses, norms, again = found["bf16"]
        assert again == losses[2:]
        # bfloat16 has three digits, of which a norm over all layers has two left.
        assert norms == pytest.approx(wanted["norms"], rel=2e-2)
        if replica == 0:
            assert losses == pytest.approx(wanted["losses"], rel=1e-2)
    saved = torch.load(tmp_path / "bf16.ckpt", weights_only=True)
    assert {one.dtype for name, one in saved["model"].items() if "batches" not in name} == {torch.float32}
    assert {one["exp_avg"].dtype for one in saved["optimizer"]["state"].values()} == {torch.float32}
    for stage in (0, 1):
        saved = torch.load(tmp_path / f"{stage}-4.ckpt", weights_only=True)["model"]
        assert list(saved) == list(wanted["state"])
        for name, value in wanted["state"].items():
            assert saved[name].dtype == value.dtype
            if size == stages:  # statistics of norms are the first replica's
                assert torch.allclose(saved[name], value, atol=1e-5), name
        whole = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)
        nn.Sequential(*layers()).load_state_dict(whole["model"])
        torch.optim.Adam(nn.Sequential(*layers()).parameters()).load_state_dict(whole["optimizer"])
        assert sorted(whole["optimizer"]["state"]) == list(range(10))
    if size == stages:
        alone = run_ranks(go_on_alone, 1, str(tmp_path), connect=False)[0]
        assert alone == pytest.approx(results[0][1][0][2:], rel=1e-5)


def go_on_alone(rank: int, size: int, folder: str) -> list[float]:
    """Go on in one stage from what two have saved."""
    fabric = fabric_of(1, 1, micro_batches=2)
    net = pipe(1)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    fabric.load(f"{folder}/1.ckpt", {"model": model, "optimizer": optimizer})
    return steps(fabric, model, optimizer, range(2, 4))[0]


# --- the Trainer ----------------------------------------------------------------------------------------------------


class Trained(lw.Module):
    """Layers as one process has them, or in stages; losses are means, or sums with weights."""

    def __init__(self, stages: int, *, sums: bool = False) -> None:
        super().__init__()
        self.stages = stages
        self.sums = sums
        self.pipe: Any = None
        self.seen: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        if self.pipe is None:
            made = layers(has_norm=False)
            self.pipe = pipe(self.stages, layers=made) if self.stages else nn.Sequential(*made)
            torch.manual_seed(11)

    def loss(self, batch: Any) -> Tensor:
        if self.stages:
            step = self.pipe.train_batch if torch.is_grad_enabled() else self.pipe.eval_batch
            loss: Tensor = step(batch)
            return loss
        return nn.functional.mse_loss(self.pipe(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return lw.Loss(loss * len(batch[0]), weight=len(batch[0])) if self.sums else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs: Tensor = self.pipe.predict_batch(batch[0]) if self.stages else self.pipe(batch[0])
        return outputs

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert any(one.grad is not None for one in self.pipe.parameters()) or self.trainer.strategy.stage

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), self.trainer.optimizers[0].param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


def fit(strategy: Any, size: int, stages: int, steps: int, **changes: Any) -> tuple[lw.Trainer, Trained]:
    """Train on 22 shuffled samples in batches of four, so that the last is short."""
    module = changes.pop("module", None) or Trained(stages, sums=changes.pop("sums", False))
    ckpt_path = changes.pop("ckpt_path", None)
    changes.pop("sums", None)
    arguments = {
        "accelerator": "cpu", "strategy": strategy, "devices": size, "max_steps": steps, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": size == 4,
        "num_sanity_val_steps": 1, "gradient_clip_val": 0.3, **changes,
    }  # fmt: skip
    trainer = lw.Trainer(**arguments)
    lw.seed_everything(7, verbose=False)
    data = TensorDataset(*batch(5, size=22))
    held = TensorDataset(*batch(6, size=20))  # two replicas have three and two batches
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(held, 4), ckpt_path=ckpt_path)
    return trainer, module


def stages_of(size: int) -> tuple[int, ...]:
    return (0, 1) if size == 2 else (1,)


def train_in_stages(rank: int, size: int, folder: str, accumulate: int, sums: bool) -> list[Any]:
    found: list[Any] = []
    for stage in stages_of(size):

        def strategy(stage: int = stage) -> DeepSpeedStrategy:
            return DeepSpeedStrategy(stage=stage)

        options = {"accumulate_grad_batches": accumulate, "sums": sums}
        trainer, module = fit(strategy(), size, 2, 7, **options)
        trainer.save_checkpoint(f"{folder}/{stage}-whole.ckpt")
        found.append((module.seen, float(trainer.callback_metrics["val"]), trainer.progress.samples))
        trainer, module = fit(strategy(), size, 2, 4, **options)
        trainer.save_checkpoint(f"{folder}/{stage}.ckpt")
        if stage:
            trainer.validate(module, DataLoader(TensorDataset(*batch(6, size=20)), 4), verbose=False)
            found.append(float(trainer.callback_metrics["val"]))
            predictions = trainer.predict(module, DataLoader(TensorDataset(*batch(6, size=20)), 4))
            found.append([one.tolist() for one in predictions])
        trainer, _ = fit(strategy(), size, 2, 7, ckpt_path=f"{folder}/{stage}.ckpt", **options)
        trainer.save_checkpoint(f"{folder}/{stage}-again.ckpt")
    return found


def train_alone(rank: int, size: int, folder: str, accumulate: int, sums: bool) -> list[Any]:
    found = []
    for steps in (7, 4):
        trainer, module = fit("single_device", 1, 0, steps, accumulate_grad_batches=accumulate, sums=sums)
        trainer.save_checkpoint(f"{folder}/alone-{steps}.ckpt")
        found.append((module.seen, float(trainer.callback_metrics["val"])))
    trainer.validate(module, DataLoader(TensorDataset(*batch(6, size=20)), 4), verbose=False)
    found.append(float(trainer.callback_metrics["val"]))
    found.append([one.tolist() for one in trainer.predict(module, DataLoader(TensorDataset(*batch(6, size=20)), 4))])
    return found


def from_stages(rank: int, size: int, folder: str, accumulate: int, sums: bool) -> None:
    trainer, _ = fit(
        "single_device", 1, 0, 7, accumulate_grad_batches=accumulate, sums=sums, ckpt_path=f"{folder}/1.ckpt"
    )
    trainer.save_checkpoint(f"{folder}/from-1.ckpt")


def check_trainer(size: int, accumulate: int, sums: bool, tmp_path: Path) -> None:
    """Train with the Trainer on `size` ranks, and compare with one process."""
    alone = run_ranks(train_alone, 1, str(tmp_path), accumulate * size // 2, sums, connect=False)[0]
    results = run_ranks(train_in_stages, size, str(tmp_path), accumulate, sums, connect=False, timeout_s=60)

    def read(name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        return loaded

    def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
        assert list(one["state_dict"]) == list(other["state_dict"])
        found = max((one["state_dict"][name] - value).abs().max().item() for name, value in other["state_dict"].items())
        first, second = one["optimizer_states"][0]["state"], other["optimizer_states"][0]["state"]
        assert sorted(first) == sorted(second)
        for number, entry in second.items():
            assert first[number]["step"] == entry["step"]
            found = max(found, (first[number]["exp_avg"] - entry["exp_avg"]).abs().max().item())
        return found

    wanted = read("alone-7")
    run_ranks(from_stages, 1, str(tmp_path), accumulate * size // 2, sums, connect=False)
    assert distance(read("from-1"), wanted) < 1e-6
    for number, stage in enumerate(stages_of(size)):
        assert distance(read(f"{stage}-again"), read(f"{stage}-whole")) == 0
        # The same sums in another order.
        assert distance(read(f"{stage}-whole"), wanted) < 1e-6
        seen, val, samples = results[0][number]
        assert samples == 22 + 22 + 8
        of_steps = slice(None) if size == 2 else slice(1, None, 2)  # one process reads two batches for each step
        assert [rate for _, rate in seen] == [rate for _, rate in alone[0][0]][of_steps]
        assert val == pytest.approx(alone[0][1], rel=1e-5)
        if size == 2:
            assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in alone[0][0]], rel=1e-5)
    assert results[0][-2] == pytest.approx(alone[2], rel=1e-5)
    for *_, outputs in results:  # five batches that were dealt to replicas, whose stages have the same
        assert torch.allclose(torch.tensor(outputs), torch.tensor(alone[3]), atol=1e-5)
