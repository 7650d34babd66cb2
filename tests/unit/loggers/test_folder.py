from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from toys import loader, net, quiet

from loopwright.errors import ConfigError
from loopwright.loggers import CSVLogger, DummyLogger, TensorBoardLogger, share_version
from loopwright.loggers.folder import FolderLogger
from loopwright.loggers.run_folder import RunFolder

BOTH = pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])


@BOTH
def test_paths(kind: type[FolderLogger]) -> None:
    logger = kind("logs", name="exp", version=3)
    assert (logger.save_dir, logger.name, logger.version) == ("logs", "exp", 3)
    assert logger.root_dir == os.path.join("logs", "exp")
    assert logger.log_dir == os.path.join("logs", "exp", "version_3")


@BOTH
def test_default_name(kind: type[FolderLogger]) -> None:
    assert kind("logs").log_dir == os.path.join("logs", "loopwright_logs", "version_0")


@BOTH
@pytest.mark.parametrize("name", [None, ""])
def test_without_name_the_level_is_left_out(kind: type[FolderLogger], name: str | None) -> None:
    assert kind("logs", name=name).log_dir == os.path.join("logs", "version_0")


@BOTH
def test_text_versions_are_used_as_they_are(kind: type[FolderLogger]) -> None:
    assert kind("logs", name="exp", version="best").log_dir == os.path.join("logs", "exp", "best")


@BOTH
def test_root_dir_is_another_name_for_save_dir(kind: type[FolderLogger]) -> None:
    assert kind(root_dir="logs", version=0).log_dir == kind("logs", version=0).log_dir


@BOTH
@pytest.mark.parametrize("arguments", [{}, {"save_dir": "a", "root_dir": "b"}])
def test_exactly_one_directory_is_needed(kind: type[FolderLogger], arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        kind(**arguments)


@BOTH
def test_home_and_variables_are_expanded(kind: type[FolderLogger], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("WHERE", "there")
    assert kind("~/$WHERE").save_dir == "/home/somebody/there"


@BOTH
@pytest.mark.parametrize("version", [-1, 1.5, True])
def test_bad_versions_are_errors(kind: type[FolderLogger], version: object) -> None:
    with pytest.raises(ConfigError, match="version="):
        kind("logs", version=version)


def test_the_next_version_is_one_above_the_highest(tmp_path: Path) -> None:
    for folder in ("version_0", "version_7", "version_x", "other"):
        (tmp_path / folder).mkdir()
    assert RunFolder(tmp_path, None, None).version == 8


def test_a_version_is_taken_at_first_use_and_not_before(tmp_path: Path) -> None:
    CSVLogger(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_runs_never_take_the_same_version(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path, None, None) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda folder: folder.version, folders))
    assert sorted(versions) == list(range(40))


def test_other_ranks_make_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path)
        logger.log_metrics({"a": 1.0}, 0)
        logger.log_hyperparams({"lr": 1})
        logger.log_graph(None)
        assert logger.state_dict() == {}
        logger.finalize("success")
        assert logger.version == 0
    assert not list(tmp_path.iterdir())


def test_loggers_of_one_trainer_share_a_version(tmp_path: Path) -> None:
    first, second = TensorBoardLogger(tmp_path), CSVLogger(tmp_path)
    share_version([first, DummyLogger(), second])
    share_version([first, second])
    assert first.log_dir == second.log_dir
    assert first.version == 0


def test_loggers_that_do_not_share_a_folder_do_not_clash(tmp_path: Path) -> None:
    assert {TensorBoardLogger(tmp_path).version, CSVLogger(tmp_path).version} == {0, 1}


def test_the_next_trainer_takes_the_next_version(tmp_path: Path) -> None:
    for version in range(3):
        loggers = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
        share_version(loggers)
        assert [logger.version for logger in loggers] == [version, version]


def test_loggers_of_one_kind_do_not_share(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path), CSVLogger(tmp_path)]
    share_version(loggers)
    assert [logger.version for logger in loggers] == [0, 1]


def test_a_version_of_ones_own_is_not_shared(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, version="mine"), TensorBoardLogger(tmp_path)]
    share_version(loggers)
    assert [logger.version for logger in loggers] == ["mine", 0]


def test_a_claimed_empty_folder_is_given_back_on_resume(tmp_path: Path) -> None:
    before = CSVLogger(tmp_path)
    before.log_metrics({"a": 1.0}, 0)
    state = before.state_dict()
    after = CSVLogger(tmp_path)
    assert after.version == 1
    after.load_state_dict(state)
    assert after.version == 0
    assert [path.name for path in Path(after.root_dir).iterdir()] == ["version_0"]


def test_hyperparameters_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    CSVLogger(tmp_path, version="a").log_hyperparams({"lr": 1})
    again = CSVLogger(tmp_path, version="a")
    again.log_hyperparams({"lr": 1})
    other = CSVLogger(tmp_path, version="a")
    with pytest.warns(UserWarning, match=r"hparams\.1\.yaml"):
        other.log_hyperparams({"lr": 2})
    assert (Path(other.log_dir) / "hparams.1.yaml").read_text() == "lr: 1\n"
    assert (Path(other.log_dir) / "hparams.yaml").read_text() == "lr: 2\n"


@pytest.mark.parametrize("version", ["../../other", "/{}/other"])
def test_a_checkpoint_that_names_a_folder_elsewhere_is_not_followed(tmp_path: Path, version: str) -> None:
    logger = CSVLogger(tmp_path / "logs")
    version = version.format(tmp_path)
    log_dir = os.path.join(logger.root_dir, version)
    state = {"log_dir": log_dir, "version": version, "step": 3, "rows": 0, "columns": [], "last_row": {}}
    logger.load_state_dict(state)
    assert logger.version == 0
    asked = CSVLogger(tmp_path / "logs", version=version)  # the user's own wish
    asked.load_state_dict(state)
    assert asked.version == version


def test_loggers_that_share_go_on_in_one_folder_on_resume(tmp_path: Path) -> None:
    before: list[FolderLogger] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    share_version(before)
    for logger in before:
        logger.log_metrics({"a": 1.0}, 0)
    states = [logger.state_dict() for logger in before]
    before[0].finalize("failed")
    after: list[FolderLogger] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    share_version(after)
    for logger, state in zip(after, states, strict=True):
        logger.load_state_dict(state)
    assert [logger.version for logger in after] == [0, 0]


def test_a_logger_whose_file_is_gone_leaves_the_shared_folder(tmp_path: Path) -> None:
    before: list[FolderLogger] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    share_version(before)
    for logger in before:
        logger.log_metrics({"a": 1.0}, 0)
    states = [logger.state_dict() for logger in before]
    before[0].finalize("failed")
    os.remove(os.path.join(before[1].log_dir, "metrics.csv"))
    after: list[FolderLogger] = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    share_version(after)
    after[0].load_state_dict(states[0])
    with pytest.warns(UserWarning, match="CSVLogger starts a new run"):
        after[1].load_state_dict(states[1])
    assert [logger.version for logger in after] == [0, 1]


@BOTH
def test_a_subclass_with_its_own_name_and_version_has_its_own_folder(kind: type[FolderLogger], tmp_path: Path) -> None:
    class Named(kind):  # type: ignore[valid-type,misc]
        @property
        def name(self) -> str:
            return "mine"

        @property
        def version(self) -> str:
            return "first"

    logger = Named(str(tmp_path))
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert logger.root_dir == os.path.join(tmp_path, "mine")
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(logger.root_dir) == ["first"]


def test_a_logger_that_moves_finishes_its_rows_and_begins_again(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="first")
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.move_to("second")
    logger.log_metrics({"loss": 2.0})
    logger.save()
    assert (tmp_path / "first" / "metrics.csv").read_text() == "loss,step\n1.0,4\n"
    assert (tmp_path / "second" / "metrics.csv").read_text() == "loss,step\n2.0,0\n"


@BOTH
@pytest.mark.parametrize("version", [None, 3])
def test_a_folder_that_cannot_be_made_is_refused_before_the_training(
    kind: type[FolderLogger], version: int | None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    trainer = quiet(max_epochs=1, logger=kind(tmp_path / "file" / "logs", version=version))
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: logs cannot be written to .*is a file, not a folder"):
        trainer.fit(net(), loader())
    assert trainer.global_step == 0
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="no permission"):
        CSVLogger(tmp_path / "logs").check_target()


def test_a_check_makes_no_folder(tmp_path: Path) -> None:
    CSVLogger(tmp_path / "a" / "b").check_target()
    CSVLogger("memory://a/b").check_target()
    assert not list(tmp_path.iterdir())
