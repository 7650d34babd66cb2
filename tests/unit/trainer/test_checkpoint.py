"""What the Trainer writes into a checkpoint, and what it does with files that are damaged, foreign or hostile."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_program import make, report
from toys import Net, ValidatedNet, assert_same, loader, net, quiet, weights

import loopwright as lw
from loopwright.checkpoint import Trusted, storage
from loopwright.errors import CheckpointError, ConfigError, DataError

FIXTURES = Path(__file__).parents[2] / "fixtures"


# --- content ---------------------------------------------------------------------------------------------------------

READ_ANYWHERE = """
import sys, torch
checkpoint = torch.load(sys.argv[1], weights_only=True)
assert not any(name.partition(".")[0] == "loopwright" for name in sys.modules)
print(*sorted(key for key in checkpoint if key != "loopwright"))
print(checkpoint["epoch"], checkpoint["global_step"], *checkpoint["state_dict"])
print(*checkpoint["optimizer_states"][0], *checkpoint["lr_schedulers"][0])
"""


class Described(Net):
    def __init__(self, width: int = 3, name: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_any_script_with_torch_opens_a_checkpoint_and_finds_the_fields_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    trainer = quiet(max_epochs=1, callbacks=[lw.EMA(0.5)])
    trainer.fit(net(Described, 5, seed=1), loader())
    trainer.save_checkpoint(path)
    done = subprocess.run(
        [sys.executable, "-c", READ_ANYWHERE, str(path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    keys, module, states = done.stdout.splitlines()
    assert set(keys.split()) == {
        "epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "callbacks", "hyper_parameters",
        "hparams_name", "loopwright_version",
    }  # fmt: skip
    assert module.startswith("1 4 net.0.weight net.0.bias")
    assert states.startswith("state param_groups step_size")
    assert Described.load_from_checkpoint(path).hparams == {"width": 5, "name": "x"}


@pytest.mark.parametrize("read", ["load_from_checkpoint", "fit"])
def test_weights_of_other_shapes_are_all_named_with_what_to_do(read: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    trainer = quiet(max_epochs=1)
    trainer.fit(net(Described, 5, seed=1), loader())
    trainer.save_checkpoint(path)

    class Other(Described):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.net[0] = torch.nn.Linear(self.net[0].in_features + 1, self.net[0].out_features + 2)

    def load() -> None:
        if read == "fit":
            quiet(max_epochs=2).fit(Other(), loader(), ckpt_path=path)
        else:
            Other.load_from_checkpoint(path, strict=False)

    with pytest.raises(CheckpointError) as caught:
        load()
    text = str(caught.value)
    assert "size mismatch for net.0.weight" in text
    assert "size mismatch for net.0.bias" in text
    assert "delete these tensors from checkpoint['state_dict'] in on_load_checkpoint" in text


class Leaves:
    """Something that is no plain value."""


@pytest.mark.parametrize("where", ["module", "callback state", "callback hook", "data module"])
def test_a_value_that_is_not_plain_is_named_and_nothing_is_written(where: str, tmp_path: Path) -> None:
    class Module(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if where == "module":
                checkpoint["mine"] = {"deep": [1, Leaves()]}

    class Mine(lw.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [1, Leaves()]} if where == "callback state" else {}

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if where == "callback hook":
                checkpoint["mine"] = {"deep": [1, Leaves()]}

    class Data(lw.DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"deep": [1, Leaves()]} if where == "data module" else {}

    trainer = quiet(max_epochs=1, callbacks=[Mine()])
    trainer.fit(Module(), datamodule=Data())
    path = tmp_path / "x.ckpt"
    with pytest.raises(CheckpointError, match=r"\['deep'\]\[1\].*Leaves"):
        trainer.save_checkpoint(path)
    assert not path.exists()


class KeepsObject(Net):
    """Puts an object into its checkpoints, marked as trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = {1, 2}
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = Trusted(complex(1, 2))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["kept"]


def test_a_trusted_object_comes_back_only_to_who_trusts(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    trainer = quiet(max_epochs=1)
    trainer.fit(KeepsObject(), loader())
    trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    trusting, careful = KeepsObject(), KeepsObject()
    quiet(max_epochs=2).fit(trusting, loader(), ckpt_path=path, weights_only=False)
    assert trusting.loaded == complex(1, 2)
    quiet(max_epochs=2).fit(careful, loader(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        careful.loaded.real  # noqa: B018


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _fit(path: Path) -> None:
    quiet(max_epochs=1).fit(Net(), loader(), ckpt_path=path)


def _fit_last(path: Path) -> None:
    saver = lw.ModelCheckpoint(path.parent)
    quiet(max_epochs=1, enable_checkpointing=True, callbacks=[saver]).fit(Net(), loader(), ckpt_path="last")


def _test(path: Path) -> None:
    quiet().test(net(ValidatedNet), loader(), ckpt_path=path)


@pytest.mark.parametrize("read", [_fit, _fit_last, _test, Net.load_from_checkpoint])
def test_a_planted_pickle_is_never_executed(read: Any, tmp_path: Path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "checkpoints" / "x.ckpt"
    path.parent.mkdir()
    planted = {"state_dict": Net().state_dict(), "epoch": 0, "global_step": 0, "loops": {"evil": Bomb(mark)}}
    torch.save(planted, path)
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        read(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize("read", [_fit, _fit_last, _test, Net.load_from_checkpoint])
@pytest.mark.parametrize("place", ["evil", "hyper_parameters", "callbacks"])
def test_one_beside_what_training_reads_is_not_executed_either(place: str, read: Any, tmp_path: Path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "checkpoints" / "x.ckpt"
    path.parent.mkdir()
    torch.save({"state_dict": net(ValidatedNet).state_dict(), "epoch": 0, place: {"evil": Bomb(mark)}}, path)
    with contextlib.suppress(CheckpointError):  # the rest may be read, or all of it refused
        read(path)
    assert not mark.exists()


# --- damaged files ---------------------------------------------------------------------------------------------------


def alter(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * at)])


def newest(folder: Path) -> Path:
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


class StopsAt(lw.Callback):
    """Leaves the process, as far as the run can tell."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


@pytest.mark.parametrize(("damage", "at"), [(alter, 0.3), (alter, 0.9), (cut, 0.0), (cut, 0.4), (cut, 0.99)])
def test_a_damaged_newest_checkpoint_is_named_and_skipped(damage: Any, at: float, tmp_path: Path) -> None:
    root = tmp_path / "run"
    whole = make("across_epochs", root)
    whole.fit(None)
    expected = report(whole, root)
    shutil.rmtree(root)
    with pytest.raises(RuntimeError, match="stopped"):
        make("across_epochs", root, [StopsAt(10)]).fit(None)
    damaged = newest(root / "checkpoints")
    damage(damaged, at)
    resumed = make("across_epochs", root)
    with pytest.warns(UserWarning, match=f"{damaged.name}.* is damaged and skipped|{damaged.name}.* skipped"):
        resumed.fit("last")
    assert report(resumed, root) == expected


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error_that_names_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    trainer = quiet(max_epochs=1)
    module = Net(torch.optim.Adam)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    data = path.read_bytes()
    at = data.index(module.net[0].weight.detach().numpy().tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    before = weights(module)
    with pytest.raises(CheckpointError, match=r"damaged.*state_dict.*net\.0\.weight"):
        quiet(max_epochs=2).fit(module, loader(), ckpt_path=path)
    assert_same(module, before)


def test_only_damaged_checkpoints_mean_a_fresh_start_that_says_so(tmp_path: Path) -> None:
    saver = {"dirpath": tmp_path, "save_top_k": -1}
    quiet(max_epochs=2, enable_checkpointing=True, callbacks=[lw.ModelCheckpoint(**saver)]).fit(Net(), loader())
    for path in tmp_path.glob("*.ckpt"):
        cut(path, 0.5)
    trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=[lw.ModelCheckpoint(**saver)])
    with pytest.warns(UserWarning, match="damaged and skipped") as caught:
        trainer.fit(Net(), loader(), ckpt_path="last")
    assert sum("damaged and skipped" in str(one.message) for one in caught) == 2
    assert trainer.global_step == 8


# --- limits and resume -----------------------------------------------------------------------------------------------


def saved(path: Path, *, data: Any = None, **limits: Any) -> Path:
    trainer = quiet(**limits)
    trainer.fit(net(), data or loader())
    trainer.save_checkpoint(path)
    return path


def test_a_finished_run_takes_no_step_and_writes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make("overfit", root).fit(None)
    before = {path.name: path.stat().st_mtime_ns for path in (root / "checkpoints").iterdir()}
    seen: list[str] = []

    class Hooks(lw.Callback):
        def on_train_start(self, *args: Any) -> None:
            seen.append("start")

        def on_train_batch_start(self, *args: Any) -> None:
            seen.append("batch")

        def on_train_end(self, *args: Any) -> None:
            seen.append("end")

    again = make("overfit", root, [Hooks()])
    with pytest.warns(UserWarning, match="nothing to do: 3 epochs and 6 steps are done"):
        again.fit("last")
    assert seen == ["start", "end"]
    assert {path.name: path.stat().st_mtime_ns for path in (root / "checkpoints").iterdir()} == before


@pytest.mark.parametrize("first", [3, 4, 5])
def test_more_steps_than_before_go_on_without_a_step_too_many(first: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_steps=first)
    whole, resumed = net(), net()
    quiet(max_steps=8).fit(whole, loader())
    trainer = quiet(max_steps=8)
    trainer.fit(resumed, loader(), ckpt_path=path)
    assert (trainer.global_step, trainer.current_epoch, trainer.progress.total_batches) == (8, 2, 8)
    assert_same(whole, resumed)


def test_limits_do_not_reach_the_saved_progress(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_epochs=1, limit_train_batches=2)
    trainer = quiet(max_epochs=2)
    trainer.fit(net(), loader(), ckpt_path=path)
    assert (trainer.global_step, trainer.progress.total_batches) == (6, 6)
    assert trainer.limit_train_batches is None or trainer.limit_train_batches == 1.0


def test_another_accumulation_goes_on_after_the_samples_that_were_seen(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_steps=2, max_epochs=1, accumulate_grad_batches=1)
    seen: list[int] = []

    class Sizes(lw.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[Sizes()])
    trainer.fit(net(), loader(), ckpt_path=path)
    assert seen == [2, 3]
    assert (trainer.global_step, trainer.progress.samples) == (3, 8)


def test_another_batch_size_in_the_middle_of_an_epoch_goes_on_where_the_samples_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_steps=2, max_epochs=1)
    trainer = quiet(max_epochs=1)
    trainer.fit(net(), loader(batch_size=4), ckpt_path=path)
    assert (trainer.global_step, trainer.progress.samples) == (3, 8)


def test_a_batch_size_that_does_not_divide_the_samples_read_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_steps=2, max_epochs=1)
    with pytest.raises(DataError, match="The epoch was begun with 2 samples in a batch; now there are 3"):
        quiet(max_epochs=1).fit(net(), loader(batch_size=3), ckpt_path=path)


def test_another_sampler_order_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_steps=2, max_epochs=1)
    with pytest.raises(DataError, match="returned other indices"):
        quiet(max_epochs=1).fit(net(), loader(shuffle=True), ckpt_path=path)


# --- Lightning's own -------------------------------------------------------------------------------------------------


class Foreign(lw.Module):
    """The module of tests/fixtures/make_lightning_checkpoint.py."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)
        self.began: tuple[int, int, dict[str, Any], float] | None = None

    def on_train_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.began = (
            self.trainer.current_epoch,
            self.trainer.global_step,
            {k: v.clone() for k, v in optimizer.state[self.net.weight].items()},
            optimizer.param_groups[0]["lr"],
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_a_lightning_checkpoint_resumes_with_weights_optimizer_schedule_and_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = FIXTURES / "lightning-2.6.ckpt"
    original = torch.load(path, weights_only=True)
    stopping = lw.EarlyStopping("loss", patience=9)
    saver = lw.ModelCheckpoint(tmp_path, monitor="loss", mode="max", every_n_epochs=2)
    module = Foreign()
    trainer = quiet(max_epochs=4, enable_checkpointing=True, callbacks=[stopping, saver])
    trainer.fit(module, loader(), ckpt_path=path)
    assert module.began is not None
    epoch, step, state, lr = module.began
    saved_state = original["optimizer_states"][0]
    assert (epoch, step) == (2, 8)
    assert (trainer.current_epoch, trainer.global_step) == (4, 16)
    assert all(torch.equal(state[name], saved_state["state"][0][name]) for name in saved_state["state"][0])
    assert lr == saved_state["param_groups"][0]["lr"] == 0.025
    assert "random number generators and data order start from scratch" in caplog.text
    assert stopping.best_score <= original["callbacks"]["EarlyStopping{'monitor': 'loss', 'mode': 'min'}"]["best_score"]


def test_a_lightning_checkpoint_gives_its_module_and_hyperparameters() -> None:
    path = FIXTURES / "lightning-2.6.ckpt"
    module = Foreign.load_from_checkpoint(path, lr=0.5)
    assert module.hparams == {"width": 4, "lr": 0.5}
    assert_same(module, torch.load(path, weights_only=True)["state_dict"])


def test_a_lightning_checkpoint_from_the_middle_of_an_epoch_continues_with_its_next_batch() -> None:
    class Seeing(Foreign):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.current_epoch, batch_idx, batch))
            return super().training_step(batch, batch_idx)

    seen: list[tuple[int, int, Any]] = []
    path, data = FIXTURES / "lightning-2.6-mid-epoch.ckpt", loader()
    batches = list(data)
    trainer = quiet(max_epochs=2)
    trainer.fit(Seeing(), data, ckpt_path=path)
    assert [(epoch, index) for epoch, index, _ in seen] == [(1, index) for index in range(2, len(batches))]
    assert all(str(batch) == str(batches[index]) for _, index, batch in seen)
    assert trainer.global_step == 6 + len(seen)


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(net(), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="weights only"):
        quiet(max_epochs=2).fit(net(), loader(), ckpt_path=tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert storage.verify(tmp_path / "x.ckpt").sealed


def test_fewer_epochs_than_are_done_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.ckpt", max_epochs=3)
    with pytest.raises(ConfigError, match="has finished 3 epochs, and max_epochs=2"):
        quiet(max_epochs=2).fit(net(), loader(), ckpt_path=path)


def test_loading_on_an_instance_is_an_error_except_within_the_class() -> None:
    class Own(Net):
        @classmethod
        def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
            return super().load_from_checkpoint(*args, **kwargs)

    with pytest.raises(lw.ModuleError, match=r"leave as it is(?s:.*)Net.load_from_checkpoint"):
        Net().load_from_checkpoint("x.ckpt")
    with pytest.raises(CheckpointError, match="missing.ckpt"):
        Own.load_from_checkpoint("missing.ckpt")


@pytest.mark.parametrize("key", ["hparams", "module_arguments"])
def test_hyperparameters_under_a_former_key_of_lightning_are_read(key: str, tmp_path: Path) -> None:
    class Described(Net):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    torch.save({"state_dict": Described().state_dict(), key: {"width": 5}}, tmp_path / "old.ckpt")
    assert Described.load_from_checkpoint(tmp_path / "old.ckpt").hparams == {"width": 5}
