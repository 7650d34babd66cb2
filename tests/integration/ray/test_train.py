"""Training in the workers of Ray Train: killed workers, another number of them, shards of data, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray_programs
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

# (ranks, place, step): each row is an attempt that ends there, in an order in which any subset can happen one after the
# other: with resume_path() a validation comes before the save of its step, with ModelCheckpoint's files after it.
KILLS = [
    ([1], "start", 0), ([0], "step", 1), ([1], "backward", 3), ([0], "save", 4), ([0, 1], "step", 5),
    ([1], "validation", 6), ([0], "save", 6), ([0, 1], "backward", 7), ([0], "start", 0), ([1], "save", 8),
    ([0], "step", 9), ([0, 1], "backward", 10), ([0, 1], "step", 11), ([0], "validation", 12), ([0, 1], "save", 12),
]  # fmt: skip
# Attempts of each run that are killed; a campaign makes all of them.
NUM_KILLED = int(os.environ.get("LOOPWRIGHT_RAY_KILLS", "1"))


def run_on_ray(folder: Path, workers: int | tuple[int, int] = 2, failures: int = 0, **settings: Any) -> Any:
    """Train `ray_programs.train` in workers; "datasets" and "scaling" are for Ray, others for the program."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder.mkdir()
    datasets, scaling = settings.pop("datasets", None), settings.pop("scaling", {})
    failure_config = FailureConfig(max_failures=failures)
    return TorchTrainer(
        ray_programs.train,
        train_loop_config={"folder": str(folder), **settings},
        scaling_config=ScalingConfig(num_workers=workers, **scaling),
        torch_config=TorchConfig(backend="gloo"),
        datasets=datasets,
        run_config=RunConfig(
            name=folder.name, storage_path=str(folder.parent / "store"), failure_config=failure_config
        ),
    ).fit()


def run_undisturbed(folder: Path, processes: int = 2, **settings: Any) -> None:
    """Train the same without Ray and without a fault, in processes of `loopwright launch`."""
    folder.mkdir()
    program = folder / "program.py"
    settings = {"folder": str(folder), "resume": "last", **settings}
    program.write_text(f"import json, ray_programs\nray_programs.train(json.loads({json.dumps(settings)!r}))\n")
    command = [sys.executable, "-m", "loopwright", "launch", "--nproc-per-node", str(processes), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "end.pt")
    return state


@pytest.mark.parametrize(("resume", "is_sharded"), [("last", False), ("ray", True)])
def test_killed_workers_end_as_if_nothing_had_happened(
    cluster: Any, tmp_path: Path, resume: str, is_sharded: bool
) -> None:
    rows = list(KILLS)
    if resume == "last":
        rows[5], rows[6], rows[13], rows[14] = rows[6], rows[5], rows[14], rows[13]
    places = [int((number + 0.2 + is_sharded / 2) * len(rows) / NUM_KILLED) for number in range(NUM_KILLED)]
    chosen = [rows[place] for place in places]
    planned = [(attempt, rank, *where) for attempt, (ranks, *where) in enumerate(chosen) for rank in ranks]

    settings = {"dropout": 0.1, "is_sharded": is_sharded, "every": 2}
    run_undisturbed(tmp_path / "undisturbed", **settings)
    began = time.monotonic()
    result = run_on_ray(tmp_path / "killed", failures=len(chosen), resume=resume, kills=planned, **settings)

    died = (tmp_path / "killed" / "died").read_text().splitlines()
    print(f"{resume}: {len(died)} kills in {len(chosen)} attempts, {time.monotonic() - began:.0f} s: {died}")
    assert {int(line.split()[0]) for line in died} == set(range(len(chosen)))
    assert ray_programs.steps(tmp_path / "killed") == ray_programs.steps(tmp_path / "undisturbed")
    torch.testing.assert_close(end_of(tmp_path / "killed"), end_of(tmp_path / "undisturbed"), rtol=0, atol=0)
    if resume == "ray":
        assert result.metrics["step"] == 12
        assert os.listdir(result.checkpoint.path) == ["checkpoint.ckpt"]


def test_an_elastic_run_has_the_same_samples_and_losses_with_more_and_with_fewer_workers(
    cluster: Any, tmp_path: Path
) -> None:
    """Two workers, four when a node joins, two when it is lost, in float64: one process has the same to 1e-12."""
    folder = tmp_path / "elastic"
    scaling = {"elastic_resize_monitor_interval_s": 2.0, "resources_per_worker": {"CPU": 1, "slot": 1}}
    settings = {"resume": "ray", "every": 1, "batch_size": 1, "max_epochs": 5}
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            run_on_ray(folder, (1, 4), failures=3, scaling=scaling, waits_for=folder / "go-on", **settings)
        except BaseException as error:  # for the test's thread
            failed.append(error)

    training = threading.Thread(target=fit)
    training.start()
    try:
        for change in (None, "add", "remove"):
            if change == "add":
                node = cluster.add_node(num_cpus=2, resources={"slot": 2}, object_store_memory=100_000_000)
            elif change == "remove":
                cluster.remove_node(node, allow_graceful=False)
            _wait_for_steps(folder, 4 if change == "add" else 2, training)
        (folder / "go-on").touch()
    finally:
        training.join()
    assert not failed
    run_undisturbed(tmp_path / "one", processes=1, **{**settings, "resume": "last"})
    rows, expected = ray_programs.steps(folder), ray_programs.steps(tmp_path / "one")
    assert {step: ids for step, (_, ids) in rows.items()} == {step: ids for step, (_, ids) in expected.items()}
    for step, (losses, _) in rows.items():
        assert sum(losses) / len(losses) == pytest.approx(sum(expected[step][0]), rel=1e-12), step
    torch.testing.assert_close(end_of(folder), end_of(tmp_path / "one"), rtol=0, atol=1e-12)


def _wait_for_steps(folder: Path, workers: int, training: threading.Thread, limit_s: float = 300) -> None:
    """Wait until the last steps were made by so many workers."""
    ends = time.monotonic() + limit_s
    while [size for _, size in ray_programs.sizes(folder)[-2:]] != [workers] * 2:
        assert training.is_alive()
        assert time.monotonic() < ends, ray_programs.sizes(folder)
        time.sleep(0.1)


def test_shards_of_ray_data_resume_within_an_epoch(cluster: Any, tmp_path: Path) -> None:
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    settings = {"resume": "ray", "every": 1, "batch_size": 4, "from_ray_data": True, "pause_s": 1.0}
    data = {"train": ray.data.from_items(ray_programs.rows_of_data())}
    run_on_ray(tmp_path / "killed", failures=1, kills=[(0, 1, "backward", 3)], datasets=data, **settings)
    assert (tmp_path / "killed" / "died").read_text().split()[0] == "0"
    samples = [ids for _, ids in ray_programs.steps(tmp_path / "killed").values()]
    for epoch in (samples[:6], samples[6:]):
        assert sorted(index for ids in epoch for index in ids) == list(range(ray_programs.SAMPLES))
    assert ray_programs.first_step(tmp_path / "killed", attempt=1) > 1, "the position was lost"


def test_an_error_of_a_worker_reaches_the_driver_with_rank_hook_and_step(cluster: Any, tmp_path: Path) -> None:
    from ray.train import WorkerGroupError

    with pytest.raises(WorkerGroupError) as caught:
        run_on_ray(tmp_path / "failed", resume="ray", error=(0, 1, "step", 3))
    assert str(caught.value.worker_failures[1]).startswith("a bad sample")
    assert "Rank 1" in str(caught.value)
    assert "Loopwright: in training_step, trainer.fit, stage train, epoch 0, step 3, batch 6" in str(caught.value)


def test_trials_of_ray_tune_are_pruned_by_what_they_report(cluster: Any, tmp_path: Path) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(time_attr="training_iteration", max_t=8, grace_period=2, reduction_factor=2)
    results = tune.Tuner(
        ray_programs.run_trial,
        param_space={"folder": str(tmp_path), "lr": tune.grid_search([0.1, 0.2, 0.3])},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=scheduler, max_concurrent_trials=1),
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path / "store"), verbose=0),
    ).fit()
    epochs = {result.config["lr"]: result.metrics["epoch"] for result in results}
    assert epochs == {0.1: 7, 0.2: 1, 0.3: 1}
    best = results.get_best_result()
    assert best.config["lr"] == 0.1
    assert torch.load(Path(best.checkpoint.path) / "checkpoint.ckpt", weights_only=False)["global_step"] == 48
    processes = [Path("/proc", process) for process in (tmp_path / "trials").read_text().split()]
    ends = time.monotonic() + 60  # the search does not wait for the last one
    while any(process.exists() for process in processes):
        assert time.monotonic() < ends
        time.sleep(0.1)
