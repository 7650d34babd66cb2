from __future__ import annotations

import pickle
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from toys import ValidatedNet, loader, net, quiet

from loopwright.errors import ConfigError, MissingDependency
from loopwright.profilers import XLAProfiler, resolve_profiler


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_package_is_named() -> None:
    with pytest.raises(MissingDependency, match=r"(?s)profiler='xla' needs.*pip install 'loopwright\[xla\]'"):
        resolve_profiler("xla")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let torch_xla's profiler, which no CPU has, write down what it is told."""
    events: list[Any] = []

    class Named:
        def __init__(self, name: str, **options: Any) -> None:
            self.what = (type(self).__name__, name, *options.values())

        def __enter__(self) -> None:
            events.append(("enter", *self.what))

        def __exit__(self, *_: Any) -> None:
            events.append(("exit", *self.what))

    class Trace(Named):
        pass

    class StepTrace(Named):
        pass

    profiler: Any = ModuleType("torch_xla.debug.profiler")
    profiler.Trace, profiler.StepTrace = Trace, StepTrace
    profiler.start_server = lambda port: events.append(("server", port)) or "server"
    for name in ("torch_xla", "torch_xla.debug"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_xla.debug.profiler", profiler)
    return events


def test_steps_and_backward_passes_have_names_and_one_server(events: list[Any]) -> None:
    quiet(max_epochs=1, profiler=XLAProfiler(port=9100)).fit(net(ValidatedNet), loader(4), loader(2))
    assert events[0] == ("server", 9100)
    entered = [event[1:] for event in events if event[0] == "enter"]
    assert [event for event in entered if event[0] == "StepTrace"] == [
        ("StepTrace", "validation_step", 0),  # the sanity check
        ("StepTrace", "run_training_step", 0),
        ("StepTrace", "run_training_step", 1),
        ("StepTrace", "validation_step", 1),
    ]
    assert [event for event in entered if event[0] == "Trace"] == [
        ("Trace", "training_step"),
        ("Trace", "backward"),
    ] * 2
    assert len(entered) == len([event for event in events if event[0] == "exit"])


@pytest.mark.parametrize("port", [0, 70000, "9012", True])
def test_a_wrong_port_is_an_error(port: Any) -> None:
    with pytest.raises(ConfigError, match="is not a port"):
        XLAProfiler(port=port)


def test_a_profiler_that_another_process_unpickled_names_steps(events: list[Any]) -> None:
    sent = pickle.loads(pickle.dumps(XLAProfiler(port=9101)))
    with sent.profile("backward"):
        pass
    assert events == [("server", 9101), ("enter", "Trace", "backward"), ("exit", "Trace", "backward")]
