"""Trainer(on_oom="shrink"): windows that run out of memory are repeated in smaller parts, with the same gradient."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from short_memory import ShortMemory
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import RecordingLogger, quiet

import loopwright as lw
from loopwright.errors import ConfigError, DataError

ROWS, WIDTH = 48, 16


class Net(lw.Module):
    """Runs out of memory where told: in "forward" or "backward" of batches above a size, or in a "step"."""

    def __init__(self, *, short: dict[int, str] | None = None, most: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.short, self.most = short or {}, most
        self.is_sum = False
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, weight = batch
        where = self.short.get(self.trainer.global_step) if len(x) > self.most else None
        self.sizes.append(len(x))
        self.seen += len(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if where == "backward" and number == 0:
                x.register_hook(_run_out)
        if where == "forward":
            raise torch.OutOfMemoryError("planted")
        losses = self.head(x).square().flatten()
        if self.is_sum:
            self.log("loss", lw.Loss((losses * weight).sum(), weight.sum()), on_step=True, on_epoch=True)
            return lw.Loss((losses * weight).sum(), weight.sum())
        self.log("loss", losses.mean(), on_step=True, on_epoch=True)
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _run_out(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("planted")


def data(batch_size: int = 8, rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(rows, WIDTH, generator=generator), torch.rand(rows, generator=generator)
    return DataLoader(TensorDataset(*samples), batch_size=batch_size, shuffle=True)


def fit(module: Net, batch_size: int = 8, rows: int = ROWS, **arguments: Any) -> tuple[lw.Trainer, RecordingLogger]:
    logger = RecordingLogger()
    torch.manual_seed(7)
    trainer = quiet(**{"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, **arguments})
    trainer.fit(module, data(batch_size, rows))
    return trainer, logger


def assert_close(module: nn.Module, other: nn.Module) -> None:
    for (name, one), two in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12, msg=name)


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@pytest.mark.parametrize(
    ("where", "is_sum", "arguments"),
    [
        ("forward", False, {}),
        ("backward", True, {}),
        ("backward", False, ACCUMULATED),
        ("forward", True, ACCUMULATED),
        ("backward", False, {"grad_accumulation_dtype": "float32"}),
    ],
)
def test_the_training_is_that_of_a_run_that_was_never_short(
    where: str, is_sum: bool, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"precision": "64-true", **arguments}
    runs = []
    for module, extra in ((Net(), {}), (Net(short=dict.fromkeys(range(99), where)), {"on_oom": "shrink"})):
        module.is_sum = is_sum
        with caplog.at_level(logging.WARNING):
            trainer, logger = fit(module, rows=44, **arguments, **extra)  # the last batch is a shorter one
        runs.append((module, trainer, logger))
    (whole, trainer, logger), (short, again, rows) = runs
    assert_close(whole, short)
    assert again.progress.parts_per_batch == 2
    assert caplog.text.count("each batch is trained in 2 parts") == 1
    assert (again.global_step, again.progress.samples) == (trainer.global_step, trainer.progress.samples)
    for name in ("loss_step", "loss_epoch"):
        found, expected = ([value for _, value in one.values(name)] for one in (rows, logger))
        assert len(found) > 1
        assert found == pytest.approx(expected, rel=1e-6)  # logged in float32


@pytest.mark.parametrize("kept", [[1], [6], [0, 3], [5, 6, 7]])
def test_a_part_without_a_loss_does_not_count(kept: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Masked(Net):
        outputs: list[Any]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, weight = batch
            if self.short and len(x) > 4:
                raise torch.OutOfMemoryError("planted")
            if not weight.any():
                return None
            losses = self.head(x).square().flatten()[weight > 0]
            return {"loss": losses.mean(), "losses": losses}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs = [outputs["loss"], outputs["losses"]]

    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(8, WIDTH, generator=generator), torch.zeros(8).index_fill(0, torch.tensor(kept), 1.0)
    runs = [Masked(), Masked(short={0: "forward"})]
    for module in runs:
        trainer = quiet(max_steps=1, precision="64-true", on_oom="shrink")
        trainer.fit(module, DataLoader(TensorDataset(*rows), batch_size=8))
        assert trainer.global_step == 1
    whole, short = runs
    for one, two in zip(whole.head.parameters(), short.head.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.outputs[0], short.outputs[0])
    assert [value is None for value in short.outputs[1]] == [max(kept) < 4, min(kept) > 3][::-1]


def test_buffers_that_a_failed_attempt_made_are_made_again() -> None:
    class Lazy(Net):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.register_buffer("average", None)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.average is None:
                self.average = torch.zeros(WIDTH)
                self.register_buffer("rows", torch.zeros(()))
            self.average = self.average + batch[0].sum(dim=0)
            self.rows += len(batch[0])
            return super().training_step(batch, batch_idx)

    whole, short = Lazy(), Lazy(short={0: "backward"})
    fit(whole, precision="64-true")
    fit(short, precision="64-true", on_oom="shrink")
    assert short.rows == 2 * ROWS
    assert_close(whole, short)


def test_random_numbers_are_those_of_a_run_that_began_with_the_smaller_parts() -> None:
    small, short = Net(dropout=0.5), Net(short={0: "backward"}, dropout=0.5)
    fit(small, batch_size=4, accumulate_grad_batches=2)
    fit(short, on_oom="shrink")
    for (name, one), two in zip(small.state_dict().items(), short.state_dict().values(), strict=True):
        assert torch.equal(one, two), name  # bit for bit
    assert short.sizes[:3] == [8, 4, 4]


def test_a_real_limit_is_kept() -> None:
    whole = Net()
    with ShortMemory() as enough:
        fit(whole, batch_size=ROWS, precision="64-true")
    short = Net()
    with ShortMemory(int(0.8 * enough.most_bytes)) as little:
        trainer, _ = fit(short, batch_size=ROWS, precision="64-true", on_oom="shrink")
    assert little.errors >= 1
    assert little.most_bytes <= little.limit_bytes
    assert trainer.progress.parts_per_batch > 1
    assert_close(whole, short)


def test_the_size_is_kept_in_checkpoints_and_rows(tmp_path: Path) -> None:
    short = Net(short={1: "forward"}, most=2)
    trainer, logger = fit(short, on_oom="shrink", max_epochs=1)
    trainer.save_checkpoint(tmp_path / "short.ckpt")
    assert logger.values("parts_per_batch")[0] == (1, 4.0)
    resumed = Net()
    again = quiet(max_epochs=2, on_oom="shrink")
    again.fit(resumed, data(), ckpt_path=tmp_path / "short.ckpt")
    assert set(resumed.sizes) == {2}
    whole, rows = Net(), RecordingLogger()
    quiet(max_epochs=2, logger=rows, log_every_n_steps=1).fit(whole, data(), ckpt_path=tmp_path / "short.ckpt")
    assert set(whole.sizes) == {8}
    assert not rows.values("parts_per_batch")


def test_a_step_without_memory_is_made_again_where_nothing_was_changed() -> None:
    class Adam(torch.optim.Adam):
        is_short = True

        def _init_group(self, group: Any, *args: Any, **kwargs: Any) -> Any:
            result = super()._init_group(group, *args, **kwargs)
            if self.is_short:  # the states are there, and half of them might not be
                Adam.is_short = False
                raise torch.OutOfMemoryError("planted")
            return result

    class Late(Adam):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.state[self.param_groups[0]["params"][0]]["step"] == 2:
                raise torch.OutOfMemoryError("planted")

    class Own(Net):
        def optimizer_step(self, *args: Any) -> None:
            super().optimizer_step(*args)

    def trained(optimizer: type[torch.optim.Adam], kind: type[Net] = Net, **arguments: Any) -> Net:
        Adam.is_short = True
        module = kind()
        module.configure_optimizers = lambda: optimizer(module.parameters(), lr=0.01)  # type: ignore[method-assign]
        fit(module, **arguments)
        return module

    whole = trained(torch.optim.Adam)
    for kind in (Net, Own):
        short = trained(Adam, kind, on_oom="shrink")
        assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), short.parameters(), strict=True))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(Late, on_oom="shrink")
    assert "had changed parameters or states" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("size", "most"), [(8, 0), (1, 0)])
def test_what_cannot_be_cut_is_an_error_that_says_so(size: int, most: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        fit(Net(short={0: "forward"}, most=most), batch_size=size, on_oom="shrink")
    notes = "".join(caught.value.__notes__)
    assert "cannot split this micro-batch" in notes
    assert "memory by owner" in notes
    assert "on_oom='shrink') or" not in notes  # it is set


def test_a_batch_that_holds_more_than_samples_is_an_error_that_says_so() -> None:
    class Holder:
        pass

    class Strange(Net):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return [*batch, Holder()]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[:2], batch_idx)

    with pytest.raises(DataError, match=r"into parts because of on_oom='shrink': 2, got a Holder\."):
        fit(Strange(short={0: "forward"}), on_oom="shrink")


def test_what_cannot_be_repeated_is_refused() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Closure(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    cases: list[tuple[Net, dict[str, Any], str]] = [
        (Manual(), {}, "manual optimization"),
        (Closure(), {}, "LBFGS"),
        (Net(), {"accumulate_across_epochs": True}, "accumulate_across_epochs=True"),
    ]
    for module, arguments, reason in cases:
        with pytest.raises(ConfigError, match=f"on_oom='shrink' with {reason}"):
            fit(module, on_oom="shrink", **arguments)
    with pytest.raises(ConfigError, match="on_oom='halve'"):
        quiet(on_oom="halve")
