"""A process, or a thread, for each XLA device: the same weights as one process without XLA, and collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import TOLERANCE, Case
from processes import TIME_LIMIT_S, run_task
from replica_tasks import fit_summed
from tasks import on_host
from test_conformance import FEW, difference

PROGRAM = Path(__file__).with_name("replica_tasks.py")


def run(folder: Path, task: str, size: int, *arguments: Any) -> Any:
    return run_task(folder, task, size, *arguments, program=PROGRAM)


PROCESSES = [*FEW, Case("bf16-mixed", 3, "norm", "sgd", True)]


def wrong(found: Any, cases: list[Case]) -> dict[str, float]:
    result = {}
    for rank, results in enumerate(found):
        for case, states in zip(cases, results, strict=True):
            for how, state in enumerate(states):
                by = difference(state, case)
                if not by <= TOLERANCE[case.precision]:
                    result[f"rank {rank}, {case}, {('by hand', 'with the Trainer')[how]}"] = by
    return result


def test_processes_train_the_weights_of_one_process(tmp_path: Path) -> None:
    assert wrong(run(tmp_path, "trained_by_processes", 2, "xla_replicas", {}, PROCESSES), PROCESSES) == {}


# What accumulates, clips, saves and loads; by XLA's own collectives.
@pytest.mark.parametrize(("size", "cases"), [(2, FEW), (4, FEW[1:2])])
def test_replicas_of_the_runtime_train_the_weights_of_one_process(size: int, cases: list[Case], tmp_path: Path) -> None:
    assert wrong(run(tmp_path, "trained_by_threads", size, "xla_replicas", {}, cases), cases) == {}


def test_a_step_can_be_one_graph(tmp_path: Path) -> None:
    found = run(tmp_path, "trained_by_threads", 2, "xla_replicas", {"one_graph": True}, FEW[1:2])
    assert wrong(found, FEW[1:2]) == {}


@pytest.mark.parametrize("how", ["threads", "processes"])
def test_collectives(how: str, tmp_path: Path) -> None:
    first, second = run(tmp_path, f"parts_of_{how}", 2)
    assert [one.pop("place") for one in (first, second)] == [(0, 2, "xla"), (1, 2, "xla")]
    assert [one.pop("sampler") for one in (first, second)] == [(2, 0), (2, 1)]
    assert first.pop("drawn") != second.pop("drawn")
    if how == "processes":  # each rank's loss counts its rank + 1 times everything that was gathered
        assert first["gradient"] == [3.0, 3.0]
    assert first == second
    assert first["mean"] == [1.5, 3.0]
    assert first["sum"] == [3.0, 6.0]
    assert first["min"] == [1.0, 2.0]
    assert first["max"] == [2.0, 4.0]
    assert first["product"] == [2.0, 8.0]
    assert first["mixed"] == {
        "count": (torch.float64, "xla", 0.5),
        "number": (torch.float64, "xla", 0.5),
        "short": (torch.bfloat16, "xla", [1.5, 3.0]),
    }
    assert first["gathered"] == [[1.0, 2.0], [2.0, 4.0]]
    assert first["sent"] == [1, [2.0, 4.0]]
    assert first["objects"] == ["", "x"]
    assert first["decision"] == [False, True]
    # The average over both ranks; a parameter that nobody uses keeps none.
    assert first["branches"] == first["manual"] == [[[0.5, 1.0]], [[1.0, 2.0]], None]


def test_the_trainer_counts_uneven_ranks_exactly(tmp_path: Path) -> None:
    ranks = run(tmp_path, "trainer_in_processes", 2)
    wanted = on_host(fit_summed("single_device", 1)[1])
    longer = on_host(fit_summed("single_device", 1, max_epochs=3)[1])
    for rank, found in enumerate(ranks):
        assert found["rank"] == rank
        assert found["resumed"][0] == 12
        for name, value in wanted.items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(found["saved"][name], found["weights"][name])
            torch.testing.assert_close(found["resumed"][1][name], longer[name], rtol=1e-5, atol=1e-6)
        compiled, _, sent = zip(*found["lines"], strict=True)
        # The second epoch has the shapes of the first one: nothing is compiled, and a step is three graphs.
        assert compiled[-1] == compiled[4]
        assert sent[-1] - sent[4] == 9
    # No single number is read in a step; the rank whose step returned None asks once whether another one counts.
    assert [found["lines"][-1][1] - found["lines"][0][1] for found in ranks] == [0, 2]
    assert ranks[0]["files"] == ranks[1]["files"] == ["state.ckpt"]
    assert ranks[0]["validate"] == ranks[1]["validate"]
    assert ranks[0]["predict"] == ranks[1]["predict"] == 22


def launch(folder: Path, method: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    tests, support = PROGRAM.parent, PROGRAM.parents[2] / "support"
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join(map(str, (support, tests)))}  # fmt: skip
    command = [sys.executable, str(tests / "launched_program.py"), method, str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=TIME_LIMIT_S)


def test_a_script_starts_resumes_and_names_the_rank_that_failed(tmp_path: Path) -> None:
    for method, epochs in (("popen", "1"), ("popen", "2")):  # the second one goes on
        done = launch(tmp_path / "replicas", method, epochs)
        assert done.returncode == 0, done.stderr
    done = launch(tmp_path / "alone", "alone", "2")
    assert done.returncode == 0, done.stderr
    wanted = torch.load(tmp_path / "alone" / "weights.pt")
    for name, value in torch.load(tmp_path / "replicas" / "weights.pt").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)  # float32, added up in another order
    failed = launch(tmp_path / "failed", "popen", "1", "fail")
    assert failed.returncode != 0
    assert "rank 0 stops: rank 1 (host" in failed.stderr
    assert "ValueError: rank 1 does not like this batch" in failed.stderr
