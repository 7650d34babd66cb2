from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction
from toys import Net, ValidatedNet, assert_same, loader, net, quiet

from loopwright.errors import ConfigError
from loopwright.profilers import PyTorchProfiler

# torch's own profiler tells its standard error stream when it starts; nothing of it is a warning.


def fitted(profiler: PyTorchProfiler, module: Any = None, samples: int = 20, **options: Any) -> Any:
    module = module if module is not None else net()
    trainer = quiet(**{"max_epochs": 1, "profiler": profiler, **options})
    trainer.fit(module, loader(samples), loader(8) if isinstance(module, ValidatedNet) else None)
    return module


def counts(profiler: PyTorchProfiler, kind: str = "train") -> dict[str, int]:
    return {event.key: event.count for event in profiler.averages[kind]}


@pytest.mark.parametrize(("steps", "expected"), [("3-5", 3), ((0, 1), 2), ("4", 1), (None, 3), ("8-30", 2)])
def test_the_steps_of_the_window_are_recorded(tmp_path: Path, steps: Any, expected: int) -> None:
    profiler = PyTorchProfiler(tmp_path, "p", steps=steps)
    fitted(profiler)
    assert counts(profiler)["[action]run_training_step"] == expected
    assert counts(profiler)["[module]Linear: net.0"] == expected
    report = (tmp_path / "fit-p.txt").read_text()
    assert report.startswith("FIT Profiler Report\ntrain steps")
    assert "run_training_step" in report


def test_a_trace_opens_in_chrome_and_names_steps_modules_and_actions(tmp_path: Path) -> None:
    fitted(PyTorchProfiler(tmp_path, steps="3-4"), accumulate_grad_batches=2)
    assert [path.name for path in tmp_path.glob("*.json")] == ["fit-train.2.pt.trace.json"]
    names = [
        event.get("name") for event in json.loads((tmp_path / "fit-train.2.pt.trace.json").read_text())["traceEvents"]
    ]
    assert names.count("[action]run_training_step") == 2
    assert names.count("[module]Tanh: net.1") == 4
    assert "aten::addmm" in names


def test_each_kind_of_step_has_a_window_of_its_own(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, steps="1-2")
    fitted(profiler, net(ValidatedNet))
    assert counts(profiler)["[action]run_training_step"] == 2
    assert counts(profiler, "validation")["[action][Strategy]SingleDeviceStrategy.validation_step"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"fit-train.0.pt.trace.json", "fit-validation.0.pt.trace.json"}


def test_a_validation_within_a_window_of_training_belongs_to_it() -> None:
    profiler = PyTorchProfiler(export_to_chrome=False, steps="1-4")
    fitted(profiler, net(ValidatedNet), val_check_interval=3)
    assert counts(profiler)["[action]run_training_step"] == 4
    assert counts(profiler)["[action][EvalLoop].validation"] == 1


def test_a_schedule_may_repeat_and_each_window_is_handed_out(tmp_path: Path) -> None:
    ready: list[Any] = []
    profiler = PyTorchProfiler(
        tmp_path, schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2, skip_first=1),
        on_trace_ready=ready.append,
    )  # fmt: skip
    fitted(profiler)
    assert len(ready) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"fit-train.2.pt.trace.json", "fit-train.5.pt.trace.json"}


def test_a_finished_window_is_let_go() -> None:
    seen: list[weakref.ref[Any]] = []
    profiler = PyTorchProfiler(
        export_to_chrome=False, steps="1-2", on_trace_ready=lambda profile: seen.append(weakref.ref(profile))
    )
    fitted(profiler)
    gc.collect()
    assert [reference() for reference in seen] == [None]


def test_hooks_and_records_are_gone_after_the_window_and_the_weights_are_the_same() -> None:
    plain = net()
    quiet(max_epochs=1).fit(plain, loader(20))
    profiled = fitted(PyTorchProfiler(export_to_chrome=False, steps="1-3"), net())
    assert_same(plain, profiled)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in profiled.modules())


def test_after_a_failure_within_the_window_another_profile_can_run() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("planned")
            return super().training_step(batch, batch_idx)

    module = net(Failing)
    profiler = PyTorchProfiler(export_to_chrome=False, steps="1-8")
    with pytest.raises(KeyError, match="planned"):
        fitted(profiler, module)
    assert not any(child._forward_hooks for child in module.modules())
    again = PyTorchProfiler(export_to_chrome=False, steps="0")
    fitted(again)
    assert counts(again)["[action]run_training_step"] == 1


def test_memory_over_time_is_written_and_falls_and_rises(tmp_path: Path) -> None:
    fitted(PyTorchProfiler(tmp_path, steps="1-2", memory_timeline=True, export_to_chrome=False))
    assert [path.name for path in tmp_path.iterdir()] == ["fit-train.0.memory.json"]
    points = json.loads((tmp_path / "fit-train.0.memory.json").read_text())["cpu"]
    times, sizes = zip(*points, strict=True)
    assert list(times) == sorted(times)
    assert len(set(sizes)) > 3


def test_stacks_of_a_flame_graph_are_written(tmp_path: Path) -> None:
    fitted(PyTorchProfiler(tmp_path, steps="1-2", export_to_flame_graph=True, with_stack=True))
    assert (tmp_path / "fit-train.0.stack").exists()


def test_the_table_is_sorted_and_limited(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(
        tmp_path, "p", steps="1", row_limit=2, sort_by_key="count", group_by_input_shapes=True,
        table_kwargs={"header": "H"},
    )  # fmt: skip
    fitted(profiler)
    report = (tmp_path / "fit-p.txt").read_text()
    assert "Input Shapes" in report
    assert "\nH\n" in report
    parts = report.split("\n---")
    assert len(parts[2].splitlines()[1:]) == 2  # below the names of the columns, which are between two rules


def test_a_fit_that_is_shorter_than_the_window_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "p", steps="7-9")
    fitted(profiler, samples=6)
    assert "there were 3 train steps, and the window begins at step 7" in (tmp_path / "fit-p.txt").read_text()
    assert profiler.averages == {}


def test_evaluation_alone_is_recorded() -> None:
    profiler = PyTorchProfiler(export_to_chrome=False, steps="0-1")
    quiet(profiler=profiler).test(net(ValidatedNet), loader(8), verbose=False)
    assert counts(profiler, "test")["[action][Strategy]SingleDeviceStrategy.test_step"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sort_by_key": "cpu_tim"}, "did you mean 'cpu_time'"),
        ({"record_shape": True}, "record_shape= (did you mean 'record_shapes'?) is unknown"),
        ({"table_kwargs": {"row_limit": 3}}, "an argument of the profiler itself"),
        ({"table_kwargs": {"header_": 3}}, "did you mean 'header'"),
        ({"schedule": 3}, "schedule=3 is not a function"),
        ({"schedule": lambda step: ProfilerAction.NONE, "steps": "1"}, "both steps and schedule"),
        ({"export_to_flame_graph": True}, "without stacks"),
        ({"metric": "time", "steps": "1"}, "metric='time'"),
        ({"steps": "5-1"}, "not a window of steps"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PyTorchProfiler(**arguments)
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nvtx_needs_cuda_and_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"sort_by_key='x'.*emit_nvtx"):
        PyTorchProfiler(emit_nvtx=True, sort_by_key="x")


def test_a_schedule_that_returns_something_else_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"schedule\(0\) returned 'record'"):
        fitted(PyTorchProfiler(schedule=lambda step: "record"))  # type: ignore[arg-type,return-value]


def test_a_window_of_validation_ends_with_it_and_the_trial_before_training_does_not_count(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, schedule=lambda step: ProfilerAction.RECORD, record_module_names=False)
    module = net(ValidatedNet)
    trainer = quiet(max_epochs=1, profiler=profiler, limit_train_batches=0)
    trainer.fit(module, loader(8), loader(8))
    assert profiler.averages == {}
    ends = PyTorchProfiler(tmp_path, steps="3-9")
    fitted(ends, module, samples=4, max_epochs=2)  # two training steps and four of validation, twice
    assert set(ends.averages) == {"train", "validation"}
    assert counts(ends, "validation")["[action][Strategy]SingleDeviceStrategy.validation_step"] == 1
    assert "[action]run_training_step" not in counts(ends, "validation")
