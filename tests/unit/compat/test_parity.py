"""Parity without Lightning: the table and its switches, and trainings that give the numbers recorded from Lightning."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from loopwright import CSVLogger
from loopwright.cli.commands.run_lightning import run_lightning
from loopwright.compat.lightning import install, uninstall
from loopwright.compat.lightning.parity import switches
from loopwright.compat.lightning.parity.rank_logs import tell_all_ranks
from loopwright.compat.lightning.parity.ranks import insert_sampler, keep_own_predictions
from loopwright.compat.lightning.parity.within_windows import WindowEnded
from loopwright.compat.lightning.parity.workers import seed_worker
from loopwright.compat.lightning.trainer import Trainer as LightningTrainer
from loopwright.errors import ConfigError, DataError, LoopwrightError
from loopwright.trainer.behavior import Behavior
from loopwright.trainer.metrics.log_output import LogOutput

pytestmark = pytest.mark.usefixtures("few_objects")  # a search collects garbage after each trial

FOLDER = Path(__file__).parents[2] / "fixtures" / "parity"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text())
PROGRAM = FOLDER.parents[1] / "compat" / "programs" / "fabric_loaders.py"
IN_CHILDREN = {"augmentation_in_workers"}


def close(ours: Any, theirs: Any) -> bool:
    """Whether two outcomes are the same; numbers as far as another processor gives the same."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(theirs, str) and re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", theirs):
        return float(ours) == pytest.approx(float(theirs), abs=1e-5)
    return bool(ours == (pytest.approx(theirs, abs=1e-5) if isinstance(theirs, float) else theirs))


Differences = Callable[[str], list[str]]


@pytest.fixture
def differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Differences:
    """Return what trains under parity, and names the outcomes that are not those of Lightning."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")  # the program's seed ends with the test

    def train(name: str) -> list[str]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as where the numbers were recorded: batch norms of a few values sum differently
        install(children=False, parity=True)
        try:
            program = runpy.run_path(str(FOLDER / "program.py"))
            program["main"](str(tmp_path), name)
        finally:
            torch.set_num_threads(threads)
            uninstall()
        ours = program["recorded"](json.loads(capsys.readouterr().out.strip().splitlines()[-1])[name])
        return [key for key, value in EXPECTED[name].items() if not close(ours[key], value)]

    return train


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - IN_CHILDREN))
def test_a_training_gives_the_numbers_of_lightning(name: str, differences: Differences) -> None:
    assert differences(name) == []


# What parity exchanges of a Trainer's behavior -> a training that shows it.
SEAMS = {
    "loop.train_window": "stopped_within_a_window",
    "loop.close_epoch": "stopped_within_an_epoch",
    "loop.validation_is_due": "stopped_within_an_epoch",
    "loop.when_to_look": "stopped_within_an_epoch",
    "evaluation_loop": "hooks_that_draw",
    "adopt_callbacks": "callbacks_of_another_trainer",
    "continue_logs": "resumed_with_new_logs",
    "restore_and_start": "states_at_the_start",
    "current_values": "bar_metrics",
    "learning_rate_curve": "learning_rate_search",
    "batch_size_rule": "batch_size_search",
    "prepare_trial": "search_before_training",
}
WITH_TESTS_BELOW = {"in_order", "error_to_raise"}


def _values(behavior: Behavior) -> dict[str, Any]:
    own = {one.name: getattr(behavior, one.name) for one in fields(behavior) if one.name != "loop"}
    return {**own, **{f"loop.{one.name}": getattr(behavior.loop, one.name) for one in fields(behavior.loop)}}


def test_each_seam_that_parity_exchanges_is_among_those_that_are_left_out() -> None:
    before = _values(LightningTrainer(logger=False).behavior)
    install(children=False, parity=True)
    try:
        after = _values(LightningTrainer(logger=False).behavior)
    finally:
        uninstall()
    assert {name for name, value in after.items() if value is not before[name]} == SEAMS.keys() | WITH_TESTS_BELOW


def test_a_rank_keeps_its_predictions_where_it_reads_data_of_its_own() -> None:
    behavior = keep_own_predictions(Behavior())
    session: Any = SimpleNamespace(trainer=SimpleNamespace(use_distributed_sampler=True))
    assert behavior.in_order(session, [["mine"]]) == [["mine"]]  # the core's asks the other ranks


@pytest.mark.parametrize(("seam", "name"), SEAMS.items())
def test_a_seam_that_parity_leaves_alone_is_noticed(
    seam: str, name: str, differences: Differences, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LightningTrainer.make_behavior

    def without(trainer: LightningTrainer) -> Behavior:
        behavior, core = make(trainer), Behavior()
        if not seam.startswith("loop."):
            return replace(behavior, **{seam: getattr(core, seam)})
        field = seam.removeprefix("loop.")
        return replace(behavior, loop=replace(behavior.loop, **{field: getattr(core.loop, field)}))

    monkeypatch.setattr(LightningTrainer, "make_behavior", without)
    try:
        noticed = bool(differences(name))
    except (AssertionError, LoopwrightError, WindowEnded):
        noticed = True  # the program itself found it
    assert noticed


def test_the_guide_to_migration_names_every_switch() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    assert not [switch.name for switch in switches.SWITCHES if f"`{switch.name}`" not in guide]


@pytest.mark.parametrize("parity", [["exit_code"], []])
def test_an_interrupt_ends_the_process_with_code_1(parity: list[str], tmp_path: Path) -> None:
    install(children=False, parity=parity)
    try:
        from lightning.pytorch import Callback, Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Interrupt(Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                raise KeyboardInterrupt

        trainer = Trainer(max_steps=1, callbacks=[Interrupt()], logger=False, default_root_dir=tmp_path)
        with pytest.raises(SystemExit if parity else KeyboardInterrupt) as ended:
            trainer.fit(BoringModel())
    finally:
        uninstall()
    assert trainer.state.status == "interrupted"
    if parity:
        assert (ended.value.code, type(ended.value.__cause__)) == (1, KeyboardInterrupt)  # type: ignore[attr-defined]


class _OwnLogger:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((metrics, step))

    def save(self) -> None:
        pass


def test_a_logger_of_the_program_is_told_on_every_rank(tmp_path: Path) -> None:
    own, ours = _OwnLogger(), CSVLogger(str(tmp_path))
    output = LogOutput([own, ours], root=str(tmp_path), is_trial=False)
    output.set_rank(1)
    tell_all_ranks(SimpleNamespace(output=output, has_ranks=True))  # type: ignore[arg-type]
    output.write({"loss": 1.0}, 3)
    assert own.rows == [({"loss": 1.0}, 3)]
    assert not list(tmp_path.iterdir())


def test_names_are_chosen_in_each_form() -> None:
    everything = {switch.name for switch in switches.SWITCHES}
    assert switches.choose(True) == switches.choose("1") == everything
    assert switches.choose(False) == switches.choose("0") == switches.choose("") == frozenset()
    assert switches.choose("reading, random_numbers") == switches.choose(["random_numbers", "reading"])
    assert switches.as_text(switches.choose("reading")) == "reading"
    assert switches.choose(switches.as_text(frozenset(everything))) == everything


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'readin'.*did you mean 'reading'"):
        install(children=False, parity=["readin"])
    uninstall()


def test_every_function_of_the_table_exists() -> None:
    package = switches.__name__.rpartition(".")[0]
    places = [change.partition(":")[2] for switch in switches.SWITCHES for change in switch.changes]
    places += [name.partition("=")[2] for switch in switches.SWITCHES for name in switch.names]
    for place in places:
        module, _, function = place.partition(".")
        assert callable(getattr(import_module(f"{package}.{module}"), function)), place


def test_the_table_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lightning(["--parity=list"]) == 0
    printed = capsys.readouterr().out
    assert all(switch.name in printed for switch in switches.SWITCHES)


def test_an_unknown_name_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lightning(["--parity=readin", "train.py"]) == 2
    assert "did you mean 'reading'" in capsys.readouterr().err


def test_children_have_the_same_switches(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import subprocess, sys\n"
        "code = 'from loopwright.compat.lightning.parity.switches import active; print(sorted(active()))'\n"
        "exec(code)\nsys.stdout.flush()\nsubprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "loopwright", "run-lightning", "--parity=reading", str(tmp_path / "program.py")],
        env=dict(os.environ), text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.stdout.splitlines() == ["['reading']", "['reading']"], found.stderr


@pytest.mark.parametrize(
    ("parity", "kept"),
    [
        # printed by the same program on Lightning 2.6.6
        (["equal_scores"], [["epoch=1", "epoch=2"], ["epoch=2", "epoch=3"], ["epoch=3", "epoch=4"]]),
        ([], [["epoch=0", "epoch=2"], ["epoch=2", "epoch=3"], ["epoch=2", "epoch=4"]]),
    ],
)
def test_of_equal_scores_the_earliest_is_replaced(parity: list[str], kept: list[list[str]], tmp_path: Path) -> None:
    install(children=False, parity=parity)
    try:
        import lightning as L
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.demos.boring_classes import BoringModel

        seen: list[list[str]] = []

        class Scored(BoringModel):
            def on_validation_epoch_end(self) -> None:
                self.log("score", [0.5, 0.5, 0.7, 0.7, 0.9][self.current_epoch])

            def on_train_epoch_start(self) -> None:
                seen.append(sorted(path.stem for path in tmp_path.iterdir()))

            def on_train_end(self) -> None:
                seen.append(sorted(path.stem for path in tmp_path.iterdir()))

        saving = ModelCheckpoint(tmp_path, monitor="score", mode="max", save_top_k=2, filename="{epoch}")
        trainer = L.Trainer(
            max_epochs=5, limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0, accelerator="cpu",
            logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saving],
        )  # fmt: skip
        trainer.fit(Scored())
    finally:
        uninstall()
    assert seen[3:] == kept


@pytest.mark.parametrize("parity", [False, True])
def test_checkpoints_follow_validations_where_the_first_epoch_has_none(parity: bool, tmp_path: Path) -> None:
    install(children=False, parity=parity)
    try:
        import lightning as L
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Scored(BoringModel):
            def on_validation_epoch_end(self) -> None:
                self.log("score", 1.0)

        def files(name: str, **options: Any) -> list[str]:
            trainer = L.Trainer(
                max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0, limit_train_batches=2, logger=False,
                limit_val_batches=1, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                callbacks=[ModelCheckpoint(tmp_path / name, save_top_k=-1, **options)],
            )  # fmt: skip
            trainer.fit(Scored())
            return sorted(path.name for path in (tmp_path / name).iterdir())

        # What Lightning 2.6.6 writes.
        assert files("epochs", filename="{epoch}") == ["epoch=1.ckpt"]
        assert files("steps", monitor="score", every_n_train_steps=1) == ["epoch=1-step=4.ckpt"]
        assert files("time", monitor="score", train_time_interval=timedelta(0, 0, 1)) == ["epoch=1-step=4.ckpt"]
    finally:
        uninstall()


def test_workers_are_seeded_as_lightning_seeds_them() -> None:
    state, numbers = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()), []
    try:
        for worker, rank in ((0, 0), (2, 1)):
            torch.manual_seed(7_000_000_000_005 + worker)
            seed_worker(worker, rank=rank)
            numbers += [torch.rand(1).item(), random.random(), numpy.random.rand()]
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
    # printed by pl_worker_init_function of Lightning 2.6.6
    assert numbers == [
        0.7897089123725891, 0.47937908448669964, 0.018936649225957503,
        0.6287057399749756, 0.6681957336818645, 0.5221482860523841,
    ]  # fmt: skip


def test_a_fabric_reads_loaders_with_workers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    install(children=False, parity=["reading"])
    try:
        import lightning as L

        fabric = L.Fabric(accelerator="cpu", devices=1)
        plain, working = fabric.setup_dataloaders(DataLoader(range(3)), DataLoader(range(3), num_workers=1))
    finally:
        uninstall()
    assert plain.worker_init_fn.func is working.worker_init_fn.func is seed_worker
    assert [batch.item() for batch in working] == [batch.item() for batch in plain] == [0, 1, 2]
    assert len(working) == 3


def test_nothing_of_a_fabric_or_trainer_is_local_to_a_function() -> None:
    install(children=False, parity=True)
    try:
        import lightning as L

        fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-mixed")
        pickle.loads(pickle.dumps(fabric))
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-true", logger=False)
        for change in switches.functions("trainer"):
            change(trainer)
        pickle.loads(pickle.dumps(trainer))
    finally:
        uninstall()


def test_a_fabric_distributes_samples_as_lightning_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    install(children=False, parity=True)
    try:
        import lightning as L

        fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
        loaders = [
            insert_sampler(fabric, DataLoader(range(14), 4, shuffle=is_shuffled)) for is_shuffled in (False, True)
        ]
    finally:
        uninstall()
    # printed by rank 0 of Lightning Fabric 2.6.6
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 2, 4, 6], [8, 10, 12]], [[5, 3, 7, 1], [2, 4, 0]],
    ]  # fmt: skip


@pytest.mark.parametrize("parity", [True, False])
def test_a_loader_gets_the_state_that_lightning_fabric_saved(parity: bool, tmp_path: Path) -> None:
    path = tmp_path / "lightning.ckpt"
    torch.save({"loader": {"passes": 2}}, path)
    install(children=False, parity=parity)
    try:
        import lightning as L

        fabric = L.Fabric(accelerator="cpu", devices=1)
        loader = runpy.run_path(str(PROGRAM))["Counting"](range(3))
        ready, plain = fabric.setup_dataloaders(loader, DataLoader(range(3)))  # type: ignore[arg-type]
        fabric.load(path, {"loader": ready})
        fabric.save(tmp_path / "ours.ckpt", {"loader": ready})
        assert torch.load(tmp_path / "ours.ckpt") == {"loader": {"passes": 2}}
        assert [batch.item() for batch in ready] == [0, 1, 2]
        assert loader.passes == 3
        fabric.save(tmp_path / "ours.ckpt", {"loader": ready, "plain": plain})
        saved = torch.load(tmp_path / "ours.ckpt")
        assert (saved == {"loader": {"passes": 3}, "plain": {}}) is parity
        if not parity:
            with pytest.raises(DataError, match=r"got the entries \['passes'\], which DataLoader cannot load"):
                fabric.load(path, {"loader": plain})
    finally:
        uninstall()
