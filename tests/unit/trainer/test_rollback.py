"""A run that rolls back: the same bits as a run without the samples that are left out, in one process."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import Net, adam, assert_same, net, quiet

import loopwright as lw
from loopwright.callbacks import BackboneFinetuning, EMAWeightAveraging, SpikeDetection, TrainingSpikeException
from loopwright.callbacks.model_checkpoint.files import find_checkpoints
from loopwright.errors import CheckpointError, ConfigError
from loopwright.loggers import CSVLogger, DummyLogger
from loopwright.report.checkpoints import find_checkpoints as find_for_report

Batches = list[tuple[Tensor, Tensor]]


def batches(bad: int | None = None, value: float = 1e4, *, count: int = 12) -> Batches:
    generator = torch.Generator().manual_seed(5)
    made = [(torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]
    if bad is not None:
        made[bad][1][2] = value
    return made


class Logs(Net):
    """A Net that logs its loss, validates, and draws random numbers in its steps."""

    def __init__(self) -> None:
        super().__init__(adam, dropout=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Manual(Logs):
    """The same, stepping two optimizers itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        return loss

    def configure_optimizers(self) -> Any:
        return adam(self.net[0].parameters()), adam(self.net[3].parameters())


class Scheduled(Logs):
    """The same, with a schedule that counts epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Stream(IterableDataset[Any]):
    """Batches whose number is not known."""

    def __init__(self, made: Batches) -> None:
        self.made = made

    def __iter__(self) -> Any:
        return iter(self.made)


def spikes(**arguments: Any) -> SpikeDetection:
    return SpikeDetection(**{"on_spike": "rollback", "warmup": 2, "rtol": 20.0, **arguments})


def fit(
    root: Path,
    data: Any,
    *callbacks: lw.Callback,
    kind: type[Net] = Logs,
    saves: lw.Callback | None = None,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> tuple[Net, lw.Trainer]:
    saves = saves or lw.ModelCheckpoint(root / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    arguments: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 2, "enable_checkpointing": True, **kwargs}
    arguments.setdefault("logger", CSVLogger(root, name="log"))
    trainer = quiet(default_root_dir=root, callbacks=[*callbacks, saves], **arguments)
    module: Net = net(kind)
    trainer.fit(module, data, batches(count=2), ckpt_path=ckpt_path)
    return module, trainer


def rows(root: Path) -> str:
    return (root / "log" / "version_0" / "metrics.csv").read_text()


def entries(root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((root / "rollbacks.json").read_text())
    return found


@pytest.mark.parametrize(
    ("bad", "value", "left_out", "arguments"),
    [
        (5, 1e4, [5, 5], {}),
        (5, math.nan, [5, 5], {"nonfinite_loss": "raise"}),
        (7, 1e4, [6, 7], {"accumulate_grad_batches": 2}),
        (6, math.nan, [6, 6], {"kind": Manual}),
        (6, 1e4, [6, 6], {"val_check_interval": 3}),
        (11, 1e4, [11, 11], {"kind": Scheduled}),  # the end of the epoch
        (5, math.nan, [5, 5], {"precision": "bf16-mixed"}),
    ],
)
@pytest.mark.parametrize("wrap", [list, lambda made: DataLoader(Stream(made), batch_size=None)], ids=["list", "stream"])
def test_the_run_is_that_without_the_samples(
    bad: int,
    value: float,
    left_out: list[int],
    arguments: dict[str, Any],
    wrap: Callable[[Batches], Any],
    tmp_path: Path,
) -> None:
    averages = [EMAWeightAveraging(decay=0.5) for _ in range(2)]
    module, trainer = fit(tmp_path / "a", wrap(batches(bad, value)), spikes(), averages[0], **arguments)
    (entry,) = entries(tmp_path / "a")
    assert (entry["epoch"], entry["batches"]) == (0, left_out)
    kept = [one for number, one in enumerate(batches(bad, value)) if not left_out[0] <= number <= left_out[1]]
    reference, other = fit(tmp_path / "b", wrap(kept), averages[1], **{**arguments, "nonfinite_loss": "raise"})
    assert_same(module, reference)
    assert trainer.global_step == other.global_step == trainer.progress.steps
    if "val_check_interval" not in arguments:  # which counts the batches that are left out
        assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_weights_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    data = batches(9)
    module, _ = fit(tmp_path, data, spikes())
    by_hand = net(Logs)
    optimizer = by_hand.configure_optimizers()
    for number, batch in enumerate(data):
        if number != 9:
            optimizer.zero_grad()
            by_hand.loss(batch).backward()
            optimizer.step()
    assert_same(module, by_hand)


class Calm(Logs):
    """Its loss jumps at a batch until something is changed."""

    is_calm = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1e6 if batch_idx == 5 and not self.is_calm else 1.0)


class Lowers(SpikeDetection):
    def after_rollback(self, trainer: lw.Trainer, pl_module: Any, entry: dict[str, Any]) -> None:
        assert trainer.global_step == entry["to_step"] == 4
        pl_module.is_calm = True
        pl_module.optimizers().param_groups[0]["lr"] = 1e-4


def test_samples_are_trained_on_again_after_a_change(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, batches(), Lowers(on_spike="rollback", skip=None, rtol=20.0, warmup=2), kind=Calm)
    assert trainer.global_step == 12
    assert module.optimizers().param_groups[0]["lr"] == 1e-4
    assert [one["left_out"] for one in entries(tmp_path)] == [False]


def test_the_spike_after_the_last_rollback_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingSpikeException, match=r"after 2 rollbacks for epoch 0 batches \[5, 5\]"):
        fit(tmp_path, batches(), spikes(skip=None, max_rollbacks=2), kind=Calm)


def test_a_spike_before_any_checkpoint_says_what_to_save(tmp_path: Path) -> None:
    saves = lw.ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=8)
    (tmp_path / "other").mkdir()
    fit(tmp_path / "other", batches(), saves=lw.ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4))
    with pytest.raises(TrainingSpikeException, match="no full checkpoint from before") as caught:
        fit(tmp_path, batches(5), spikes(), saves=saves)  # a file of another run does not count
    assert "Snapshot" in caught.value.fix


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    class Damages(lw.Callback):
        def on_train_batch_start(self, trainer: lw.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            for path in (tmp_path / "a" / "checkpoints").glob("*step=4.ckpt"):
                path.write_bytes(path.read_bytes()[:-100])

    with pytest.warns(UserWarning, match="damaged"):
        module, _ = fit(tmp_path / "a", batches(5), spikes(), Damages())
    assert entries(tmp_path / "a")[0]["to_step"] == 2
    data = batches(5)
    reference, _ = fit(tmp_path / "b", data[:5] + data[6:])
    assert_same(module, reference)


class Stops(lw.Callback):
    """Ends the program right after the rollback."""

    def __init__(self, root: Path, before: int = 0) -> None:
        self.root, self.before = root, before

    def on_train_batch_start(self, trainer: lw.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (self.root / "rollbacks.json").exists() and len(entries(self.root)) > self.before:
            raise SystemExit


def test_a_run_that_is_killed_after_the_rollback_continues_without_the_samples(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "a", batches(5), spikes(), Stops(tmp_path / "a"))
    module, trainer = fit(tmp_path / "a", batches(5), spikes(), ckpt_path="last")
    data = batches(5)
    reference, _ = fit(tmp_path / "b", data[:5] + data[6:])
    assert_same(module, reference)
    assert (len(entries(tmp_path / "a")), trainer.global_step) == (1, 11)


def test_a_file_for_batches_of_another_size_is_refused_while_they_are_ahead(tmp_path: Path) -> None:
    samples = TensorDataset(*map(torch.cat, zip(*batches(5), strict=True)))
    size = len(batches()[0][0])
    with pytest.raises(SystemExit):
        fit(tmp_path, DataLoader(samples, batch_size=size), spikes(), Stops(tmp_path))
    with pytest.raises(ConfigError, match=f"counted with {size} samples; this run reads with {size // 2} samples"):
        fit(tmp_path, DataLoader(samples, batch_size=size // 2), spikes(), ckpt_path="last")


def test_another_training_in_the_folder_does_not_leave_out_these_samples(tmp_path: Path) -> None:
    fit(tmp_path, batches(5), spikes())
    module, trainer = fit(tmp_path, batches(), spikes())
    reference, _ = fit(tmp_path / "reference", batches())
    assert_same(module, reference)
    assert trainer.global_step == 12
    fit(tmp_path, batches(7), spikes())
    assert [one["batches"] for one in entries(tmp_path)] == [[5, 5], [7, 7]]


def test_a_later_training_that_resumes_in_the_folder_does_not_leave_out_these_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, batches(5), spikes())
    fit(tmp_path, batches(), spikes(), max_steps=4)
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda one: one.stat().st_mtime_ns)
    module, trainer = fit(tmp_path, batches(), spikes(), ckpt_path=str(newest))
    assert f"no training in it had the checkpoint {newest}" in caplog.text
    reference, _ = fit(tmp_path / "reference", batches())
    assert_same(module, reference)
    assert trainer.global_step == 12


@pytest.mark.parametrize("kinds", ["AB", "BA"])
def test_two_trainings_in_one_folder_that_are_killed_after_their_rollbacks_keep_their_lists(
    kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, bad = tmp_path / "both", {"A": 5, "B": 7}

    def saves(name: str, place: Path = root) -> lw.ModelCheckpoint:
        return lw.ModelCheckpoint(place / name, every_n_train_steps=2, save_top_k=-1)

    fit(root, batches(), spikes(), saves=saves("C"), max_steps=4)  # has never rolled back
    for before, name in enumerate("AB"):
        with pytest.raises(SystemExit):
            fit(root, batches(bad[name]), spikes(), Stops(root, before), saves=saves(name))
    assert [one["batches"] for one in entries(root)] == [[5, 5], [7, 7]]
    for name in kinds:
        module, trainer = fit(root, batches(bad[name]), spikes(), saves=saves(name), ckpt_path="last")
        kept = batches(bad[name])
        kept.pop(bad[name])
        reference, _ = fit(tmp_path / name, kept)
        assert_same(module, reference)
        assert (trainer.global_step, trainer.progress.total_batches) == (11, 12)
    assert len(entries(root)) == 2
    module, trainer = fit(root, batches(), spikes(), saves=saves("C"), ckpt_path="last")
    reference, _ = fit(tmp_path / "C", batches())
    assert_same(module, reference)
    assert "C/epoch=0-step=4.ckpt" in caplog.text.partition("no training in it had the checkpoint")[2]


class JumpsTwice(Logs):
    """Its loss jumps once at two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.jumps = [5, 8]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in self.jumps:
            return loss
        self.jumps.remove(batch_idx)
        return loss * 1e6


class Alters(lw.Callback):
    """Lets another run write the list of rollbacks after the first one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        file = self.root / "rollbacks.json"
        if file.exists() and batch_idx == 6:
            file.write_text(json.dumps([{**entries(self.root)[0], "training": 1}]))


def test_runs_that_write_one_list_of_rollbacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the 1 rollback of this training, got another list"):
        fit(tmp_path, batches(), spikes(skip=None), Alters(tmp_path), kind=JumpsTwice)
    fit(tmp_path / "b", batches(5), spikes(), Alters(tmp_path / "b"))
    with pytest.raises(ConfigError, match="the rollbacks of this training, got those of another one"):
        fit(tmp_path / "b", batches(5), spikes(), ckpt_path="last", max_epochs=2)


class Fails(CSVLogger):
    """Fails, or hangs, once the first rows are written."""

    fails_from = 4
    barrier: threading.Event | None = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step is not None and step >= self.fails_from:
            if self.barrier is None:
                raise OSError("the share is gone")
            assert self.queue is not None
            self.queue.patience_s = 0.05
            self.barrier.wait()
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_run_whose_logger_would_write_abandoned_rows_later_stops_and_can_be_resumed(
    hangs: bool, tmp_path: Path
) -> None:
    failing = Fails(tmp_path / "a", name="log", version=0)
    failing.barrier = threading.Event() if hangs else None
    text = r"failed|did not accept|has not ended"
    with pytest.warns(UserWarning, match=text), pytest.raises(CheckpointError) as caught:
        fit(tmp_path / "a", batches(5), spikes(check_every_n_steps=2), logger=failing, log_every_n_steps=1)
    assert "Fails fails or hangs, and would write rows of abandoned steps later" in str(caught.value)
    assert "step=4.ckpt" in caught.value.what
    if failing.barrier is not None:
        failing.barrier.set()
    failing.fails_from = 99
    again = spikes(check_every_n_steps=2)
    module, _ = fit(tmp_path / "a", batches(5), again, logger=failing, log_every_n_steps=1, ckpt_path="last")
    kept = batches(5)
    reference, _ = fit(tmp_path / "b", kept[:5] + kept[6:], log_every_n_steps=1)
    assert_same(module, reference)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_a_checkpoint_that_does_not_know_where_a_logger_was_stops_the_run(tmp_path: Path) -> None:
    class Recovers(CSVLogger):
        def state_dict(self) -> Any:
            if self._lw_step < 5:
                raise OSError("the share is gone")
            return super().state_dict()

    with pytest.warns(UserWarning, match="the share is gone"), pytest.raises(CheckpointError) as caught:
        fit(tmp_path, batches(7), spikes(), logger=Recovers(tmp_path, name="log"), saves=lw.ModelCheckpoint(
            tmp_path / "checkpoints", every_n_train_steps=4))  # fmt: skip
    assert "does not know where that was (0-Recovers)" in str(caught.value)


class Service(DummyLogger):
    """Takes each step once, and has no state before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.last = -1

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        if step > self.last:
            self.steps.append(step)

    def state_dict(self) -> Any:
        return {"last": self.steps[-1]} if self.steps else {}

    def load_state_dict(self, state_dict: Any) -> None:
        self.last = max(self.last, *self.steps, state_dict["last"])


def test_a_service_that_had_sent_nothing_at_the_checkpoint_sends_no_step_twice(tmp_path: Path) -> None:
    service, saves = Service(), lw.ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4)
    fit(tmp_path, batches(6), spikes(check_every_n_steps=1), saves=saves, logger=service, log_every_n_steps=5)
    assert entries(tmp_path)[0]["to_step"] == 4
    assert service.steps.count(4) == 1


@pytest.mark.parametrize("written", ["..", "../../outside/a.ckpt", "/{root}/outside/a.ckpt", "link/a.ckpt", "a.txt"])
def test_only_checkpoints_of_the_run_are_set_aside_whatever_the_file_names(written: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    fit(run, batches(), max_steps=2)
    (run / "checkpoints" / "link").symlink_to(outside)
    for path in (outside / "a.ckpt", run / "checkpoints" / "a.txt", outside / "a.ckpt.abandoned"):
        path.write_text("mine")
    path = (run / "checkpoints").joinpath(written.format(root=str(tmp_path).strip("/")))
    entry = {"callback": "Sentinel", "epoch": 0, "batches": [0, 0], "left_out": False, "to_step": 0, "reading": "",
             "time_ns": 0, "training": 0, "kept": {}, "abandoned": {str(path): path.stat().st_mtime_ns}}  # fmt: skip
    (run / "rollbacks.json").write_text(json.dumps([entry]))
    before = {str(one) for one in tmp_path.rglob("*")}
    fit(run, batches(), ckpt_path="last", max_steps=2)
    assert {str(one) for one in tmp_path.rglob("*")} >= before
    assert (outside / "a.ckpt.abandoned").read_text() == "mine"


def test_a_rollback_that_was_killed_is_finished_where_the_folder_has_moved_to(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "a", batches(7), spikes(), Stops(tmp_path / "a"))
    newest = tmp_path / "b" / "checkpoints" / "epoch=0-step=6.ckpt"
    (tmp_path / "a").rename(tmp_path / "b")
    shutil.copy2(
        newest, tmp_path / "b" / "checkpoints" / "epoch=0-step=8.ckpt"
    )  # as if it had been saved, and abandoned
    (entry,) = entries(tmp_path / "b")
    entry["abandoned"] = {str(tmp_path / "a" / "checkpoints" / "epoch=0-step=8.ckpt"): newest.stat().st_mtime_ns}
    (tmp_path / "b" / "rollbacks.json").write_text(json.dumps([entry]))
    fit(tmp_path / "b", batches(7), spikes(), ckpt_path="last", max_steps=7)
    assert (tmp_path / "b" / "checkpoints" / "epoch=0-step=8.ckpt.abandoned").exists()


def test_no_file_within_a_folder_that_was_set_aside_is_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, batches(), max_steps=4)
    (found,) = (tmp_path / "checkpoints").glob("*step=4.ckpt")
    aside = tmp_path / "checkpoints" / "epoch=0-step=6.ckpt.abandoned"
    aside.mkdir()
    shutil.copy2(found, aside / "state-1-2.ckpt")  # as in a sharded checkpoint
    for place, is_url in ((str(tmp_path), False), (f"file://{tmp_path}", True)):
        assert sorted(Path(one).name for one in find_checkpoints([place], ".ckpt")) == [
            "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"], is_url  # fmt: skip
    assert sorted(one.name for one in find_for_report(tmp_path)) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"epoch": 1}]'])
def test_a_file_that_no_training_has_written_is_refused(text: str, tmp_path: Path) -> None:
    fit(tmp_path, batches(), max_steps=2)
    (tmp_path / "rollbacks.json").write_text(text)
    with pytest.raises(ConfigError, match="Expected a list of rollbacks"):
        fit(tmp_path, batches(), spikes(), ckpt_path="last")


def test_steps_that_the_policy_skips_are_no_spikes(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is skipped"):
        _, trainer = fit(tmp_path, batches(5, math.nan), spikes(), nonfinite_loss="skip")
    assert trainer.progress.nonfinite_steps == 1
    assert not (tmp_path / "rollbacks.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_across_epochs": True, "accumulate_grad_batches": 2},
        {"on_oom": "shrink"},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
)
def test_runs_that_cannot_go_back_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"A rollback within a run with {next(iter(arguments))}"):
        fit(tmp_path, batches(), spikes(), **arguments)


def test_copies_in_memory_are_checkpoints(tmp_path: Path) -> None:
    module, _ = fit(tmp_path / "a", batches(7), spikes(), saves=lw.Snapshot(every=3, folder=tmp_path))
    assert entries(tmp_path / "a")[0]["to_step"] in (3, 6)  # a copy is left out while another is written
    data = batches(7)
    reference, _ = fit(tmp_path / "b", data[:7] + data[8:])
    assert_same(module, reference)


class Waits(Logs):
    """Steps one of two optimizers, and lets the other one's gradients add up over three batches."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        first, second = self.optimizers()
        first.step()
        first.zero_grad()
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return adam(self.net[0].parameters()), adam(self.net[3].parameters())


class _JumpsOnce:
    has_jumped = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]  # of the class beside it
        if batch_idx == 6 and not self.has_jumped:
            self.has_jumped = True
            return loss * 1e6
        return loss


class Once(_JumpsOnce, Logs):
    """Its loss jumps once."""


class Tuned(Logs):
    """Has a backbone, which its optimizer does not have at first."""

    jumps_at = -1

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == self.jumps_at:
            self.jumps_at = -1
            return loss * 1e6
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adam([one for one in self.parameters() if one.requires_grad])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Faulty(Tuned):
    jumps_at = 14


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_returns_to_before_its_backbone_was_unfrozen(first: int, tmp_path: Path) -> None:
    modules = []
    for name, kind in zip("ab", (Faulty, Tuned), strict=True):
        saves = lw.ModelCheckpoint(tmp_path / name / "checkpoints", every_n_train_steps=10)
        tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=first, verbose=False)
        module, trainer = fit(tmp_path / name, batches(), tuning, *([spikes(skip=None)] if name == "a" else []),
                              kind=kind, saves=saves, max_epochs=3, log_every_n_steps=1)  # fmt: skip
        assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 2]
        modules.append(module)
    assert [one["to_step"] for one in entries(tmp_path / "a")] == [10]
    assert_same(*modules)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


class WaitsOnce(_JumpsOnce, Waits):
    """The same, with gradients that wait."""


@pytest.mark.parametrize(
    ("kinds", "arguments"),
    [
        ((WaitsOnce, Waits), {}),  # gradients that wait between two steps
        ((Once, Logs), {"log_every_n_steps": 50}),  # found in the save of step 8, which is made again
        ((Once, Logs), {"max_steps": 11}),  # with a save outside of an event at the end
    ],
)
def test_after_a_fault_that_does_not_come_again_all_is_as_without_it(
    kinds: tuple[type[Net], type[Net]], arguments: dict[str, Any], tmp_path: Path
) -> None:
    modules = []
    for name, kind in zip("ab", kinds, strict=True):
        root = tmp_path / name
        saves = lw.ModelCheckpoint(root / "checkpoints", every_n_train_steps=4, save_top_k=2, save_last=True)
        module, _ = fit(root, batches(), *([spikes(skip=None)] if name == "a" else []), kind=kind, saves=saves,
                        **arguments)  # fmt: skip
        modules.append(module)
    assert len(entries(tmp_path / "a")) == 1
    assert_same(*modules)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    names = [sorted(one.name for one in (tmp_path / name / "checkpoints").iterdir()) for name in "ab"]
    assert names[0] == names[1]
