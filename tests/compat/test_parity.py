"""Compares trainings with Lightning bit for bit, with and without parity.

tests/fixtures/parity/program.py has the trainings. With WRITE_EXPECTED=1 what Lightning gives becomes expected.json
there, which tests/unit/compat/test_parity.py compares with.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "fixtures" / "parity"
PYTHON = os.environ.get("LIGHTNING_PYTHON", "")
SIDES = {
    "theirs": [PYTHON],
    "parity": [PYTHON, "-m", "loopwright", "run-lightning", "--parity"],
    "plain": [PYTHON, "-m", "loopwright", "run-lightning"],
}
# Scenario -> what differs from Lightning without parity.
DIFFERS = {
    "validation_draws": "weights",
    "validation_that_shuffles": "weights",
    "own_generator": "weights",
    "iterable_data": "weights",
    "augmentation_in_workers": "weights",
    "several_loaders": "weights",
    "two_fits": "weights",
    "resumed": "weights",
    "resumed_within_an_epoch": "weights",
    "short_window": "weights",
    "no_loss": "hooks",
    "schedule_by_step": "weights",
    "plateau": "weights",
    "last_checkpoints": "last",
    "plateau_by_step": "weights",
    "two_optimizers": "steps",
    "two_optimizers_with_max_steps": "weights",
    "max_steps_within_an_epoch": "epochs",
    "stopped_within_an_epoch": "epochs",
    "closures": "losses",
    "several_evaluations": "rows",
    "bar_metrics": "seen",
    "half_precision": "weights",
    "metrics_of_verbs": "metrics",
    "ema": "averages",
    "mean_of_weights": "averages",
    "swa": "weights",
    "swa_with_batch_norm": "weights",
    "learning_rate_search": "results",
    "stepping_batches": "estimated",
    "fabric_methods": "losses",
    "fabric_inputs": "bf16-mixed",
    "batch_size_search": "power",
    "search_before_training": "curve",
    "sizes_before_training": "weights",
    "size_finder": "weights",
    "rate_finder": "weights",
    "validation_within_a_window": "hooks",
    "validation_across_epochs": "hooks",
    "stopped_within_a_window": "steps",
    "stopped_by_a_batch_within_a_window": "steps",
    "resumed_within_a_window": "weights",
    "pruned": "names",
    "pruned_by_structure": "names",
    "lottery_ticket": "averages",
    "pruned_after_validation": "averages",
    "verbs_after_a_data_module": "calls",
    "three_fits_of_one_trainer": "weights",
    "two_fits_with_a_logger": "seen",
    "resumed_counts": "checkpoints/epoch=0-step=7.ckpt",
    "layers_used_twice_in_half_precision": "weights",
    "names_of_checkpoints": "checkpoints",
    "buffers_in_half_precision": "trainer",
    "states_at_the_start": "seen",
    "frozen_again": "weights",
    "sparse_values": "rows",
    "limited_streams": "weights",
    "streams_shorter_than_their_limit": "weights",
    "callbacks_of_another_trainer": "stopping",
    "hooks_that_draw": "draws",
    "hooks_that_change_weights": "averages",
    "checkpoints_with_old_scores": "checkpoints",
    "checkpoints_between_validations": "checkpoints",
    "checks_of_old_values": "epochs",
    "trained_again_from_a_checkpoint": "checkpoints",
    "resumed_before_a_validation": "hooks",
    "resumed_after_a_last_batch": "hooks",
    "manual_without_outputs": "outputs",
    "resumed_with_new_logs": "files",
    "progress_of_verbs": "progress",
    "progress_with_accumulation": "progress",
    "progress_with_several_loaders": "progress",
    "progress_of_streams": "progress",
    "progress_when_skipping": "progress",
    "progress_when_stopping": "progress",
    "progress_in_manual_optimization": "progress",
    "progress_of_resumed_windows": "epoch=0-step=1.ckpt",
    "progress_of_resumed_runs": "steps",
}

# One training a line, so that a difference shows where it is.
_RECORD = """
import json, sys
from program import recorded
lines = [
    json.dumps(name) + ":" + json.dumps(recorded(one), sort_keys=True, separators=(",", ":"))
    for name, one in sorted(json.load(sys.stdin).items())
]
open(sys.argv[1], "w").write("{" + ",\\n".join(lines) + "}\\n")
"""

Outcomes = dict[str, dict[str, dict[str, Any]]]
ON_RANKS = ("ranks", "ranks_with_accumulation", "ranks_that_decide", "ranks_with_streams")
# Switch -> a training that differs from Lightning when all others are on. Those that are classes, and those of several
# processes, are left to the trainings themselves.
NEEDED = {
    "random_numbers": "validation_draws",
    "reading": "iterable_data",
    "means": "validation_that_shuffles",
    "short_windows": "short_window",
    "losses_of_none": "no_loss",
    "divided_outputs": "short_window",
    "closures": "closures",
    "schedule_steps": "schedule_by_step",
    "plateaus": "plateau",
    "last_checkpoints": "last_checkpoints",
    "optimizer_steps": "two_optimizers",
    "cut_epochs": "stopped_within_an_epoch",
    "bfloat16_on_cpu": "half_precision",
    "metrics_of_verbs": "metrics_of_verbs",
    "evaluation_rows": "metrics_of_verbs",
    "bar_metrics": "bar_metrics",
    "lr_find": "learning_rate_search",
    "stepping_batches": "stepping_batches",
    "fabric_methods": "fabric_methods",
    "fabric_inputs": "fabric_inputs",
    "batch_sizes": "batch_size_search",
    "trials": "search_before_training",
    "fit_start": "states_at_the_start",
    "within_windows": "validation_within_a_window",
    "resumed_events": "resumed_counts",
    "frozen_parameters": "frozen_again",
    "step_values": "sparse_values",
    "evaluation_steps": "sparse_values",
    "kept_callbacks": "callbacks_of_another_trainer",
    "second_fits": "three_fits_of_one_trainer",
    "data_modules": "verbs_after_a_data_module",
    "checkpoint_folders": "two_fits_with_a_logger",
    "checkpoint_names": "names_of_checkpoints",
    "buffers": "buffers_in_half_precision",
    "autocast_cache": "layers_used_twice_in_half_precision",
    "hook_order": "hooks_that_change_weights",
    "due_checkpoints": "checkpoints_with_old_scores",
    "stopping_checks": "checks_of_old_values",
    "resumed_logs": "resumed_with_new_logs",
    "loop_progress": "progress_of_verbs",
}

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")


def run(side: str, folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    found = subprocess.run(
        [*SIDES[side], str(FOLDER / "program.py"), str(folder / side), *names],
        env={**environment, "OMP_NUM_THREADS": "1", **({"MAY_REFUSE": "1"} if side == "plain" else {})},
        text=True, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("parity")
    found: Outcomes = {side: {} for side in SIDES}
    names = list(DIFFERS)
    for side, first in product(SIDES, range(0, len(names), 18)):  # a process for each 18: none takes minutes
        found[side].update(run(side, folder, *names[first : first + 18]))
    if os.environ.get("WRITE_EXPECTED"):
        environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
        subprocess.run([PYTHON, "-c", _RECORD, str(FOLDER / "expected.json")], input=json.dumps(found["theirs"]),
                       text=True, env=environment, check=True)  # fmt: skip
    return found


@pytest.mark.parametrize("name", DIFFERS)
def test_everything_is_the_same_with_parity(name: str, outcomes: Outcomes) -> None:
    theirs, ours = outcomes["theirs"][name], outcomes["parity"][name]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == value, key


@pytest.mark.parametrize("name", DIFFERS)
def test_something_differs_without_parity(name: str, outcomes: Outcomes) -> None:
    plain = outcomes["plain"][name]
    assert "refused" in plain or plain[DIFFERS[name]] != outcomes["theirs"][name][DIFFERS[name]]


def test_each_switch_is_needed(outcomes: Outcomes, tmp_path: Path) -> None:
    pairs = [f"{switch}={name}" for switch, name in NEEDED.items()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    found = subprocess.run(
        [PYTHON, str(FOLDER / "all_but_one.py"), str(tmp_path), *pairs],
        env={**environment, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    without = json.loads(found.stdout.strip().splitlines()[-1])
    assert not [switch for switch, name in NEEDED.items() if without[switch] == outcomes["theirs"][name]]


def test_everything_is_the_same_on_two_processes(tmp_path: Path) -> None:
    for name in ON_RANKS:
        theirs, ours = run("theirs", tmp_path, name)[name], run("parity", tmp_path, name)[name]
        for key, value in theirs.items():
            assert ours[key] == value, (name, key)


PROGRAMS = Path(__file__).with_name("programs")
WHOLE = [
    *(FOLDER.parent / "lightning_programs" / f"{name}.py" for name in ("evaluate", "gan", "callbacks", "fabric_loop")),
    *(PROGRAMS / f"{name}.py" for name in ("language_model", "classifier", "two_models", "fabric_loaders")),
]
_NAMES = ("forecasting", "series", "self_supervised", "tables", "neural", "finetuning", "folds")
LIBRARIES = [pytest.param(PROGRAMS / f"{name}.py", marks=pytest.mark.libraries, id=name) for name in _NAMES]
# What Loopwright leaves beside logs.
OWN_FILES = ("environment.json", "evaluation.json", "timeline.json")


def printed(side: str, program: Path, folder: Path) -> Any:
    (folder / side / "out").mkdir(parents=True)
    # PARITY: the programs' own callback that keeps generators does nothing.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PARITY": "1"}
    found = subprocess.run(
        [*SIDES[side], str(program), str(folder / side / "out")],
        cwd=folder / side, env=environment, text=True, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    line = [line for line in found.stdout.splitlines() if line.startswith("{")][-1]
    return without_own_files(json.loads(line.replace(str(folder / side), "")))


def without_own_files(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_own_files(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_own_files(one) for one in value if not (isinstance(one, str) and one.endswith(OWN_FILES))]
    return value


@pytest.mark.parametrize("program", [*(pytest.param(one, id=one.stem) for one in WHOLE), *LIBRARIES])
def test_a_program_prints_the_same_with_parity(program: Path, tmp_path: Path) -> None:
    theirs, ours = printed("theirs", program, tmp_path), printed("parity", program, tmp_path)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == value, key
