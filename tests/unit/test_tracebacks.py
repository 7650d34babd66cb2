"""What is printed of an error that nothing catches."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from types import TracebackType

import pytest

from loopwright import tracebacks
from loopwright.errors import ConfigError


def raised(error: Exception, *modules: str) -> Exception:
    """Return the error as it comes through functions of these modules, the innermost last."""

    def fail() -> None:
        raise error

    inner = fail
    for name in reversed(modules):
        space: dict[str, object] = {"__name__": name, "inner": inner}
        exec(compile("def call():\n    inner()", f"{name}.py", "exec"), space)
        inner = space["call"]  # type: ignore[assignment]
    try:
        inner()
    except Exception as caught:
        return caught
    raise AssertionError


def files(trace: TracebackType | None) -> list[str]:
    return [one.filename for one in traceback.extract_tb(trace)]


def test_frames_of_loopwright_are_left_out() -> None:
    error = raised(ValueError("x"), "loopwright.trainer.trainer", "users.module")
    assert files(tracebacks.trimmed(error)) == [__file__, "users.module.py", __file__]


def test_a_mistake_of_loopwrights_own_keeps_all_frames() -> None:
    space: dict[str, object] = {"__name__": "loopwright.trainer"}
    exec(compile("def call():\n    {}['missing']", "own.py", "exec"), space)
    with pytest.raises(KeyError) as caught:
        space["call"]()  # type: ignore[operator]
    assert files(tracebacks.trimmed(caught.value)) == [__file__, "own.py"]


def test_an_error_that_loopwright_means_is_trimmed() -> None:
    space: dict[str, object] = {"__name__": "loopwright.trainer", "error": ConfigError("wrong.", fix="right.")}
    exec(compile("def call():\n    raise error", "own.py", "exec"), space)
    with pytest.raises(ConfigError) as caught:
        space["call"]()  # type: ignore[operator]
    assert files(tracebacks.trimmed(caught.value)) == [__file__]


@pytest.mark.parametrize("file", ["_tensor.py", "autograd/graph.py", "utils/data/dataloader.py"])
def test_frames_of_torch_that_only_call_others_are_left_out(file: str) -> None:
    space: dict[str, object] = {"__name__": "torch", "error": RuntimeError("no graph")}
    name = f"{sysconfig.get_path('purelib')}/torch/{file}"
    exec(compile("def call():\n    raise error", name, "exec"), space)
    library = space["call"]
    outer: dict[str, object] = {"__name__": "loopwright.trainer", "inner": library}
    exec(compile("def call():\n    inner()", "own.py", "exec"), outer)
    with pytest.raises(RuntimeError) as caught:
        outer["call"]()  # type: ignore[operator]
    assert files(tracebacks.trimmed(caught.value)) == [__file__]


def chained(cause: OSError, message: str, module: str) -> ConfigError:
    space: dict[str, object] = {"__name__": module, "cause": cause, "error": ConfigError(message, fix="right.")}
    code = "def call():\n    try:\n        raise cause\n    except OSError as e:\n        raise error from e"
    exec(compile(code, f"{module}.py", "exec"), space)
    with pytest.raises(ConfigError) as caught:
        space["call"]()  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize(
    ("cause", "message", "module", "is_shown"),
    [
        (FileNotFoundError(2, "No such file"), "there is no checkpoint.", "loopwright.x", False),
        (OSError(28, "No space left on device"), "not written: No space left on device.", "loopwright.x", False),
        (OSError(5, "Input/output error"), "not written.", "loopwright.x", True),
        (FileNotFoundError(2, "No such file"), "there is no checkpoint.", "users.module", True),
    ],
)
def test_the_cause_is_shown_where_the_message_does_not_say_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: OSError,
    message: str,
    module: str,
    is_shown: bool,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    tracebacks.show_trimmed()
    error = chained(cause, message, module)
    sys.excepthook(type(error), error, error.__traceback__)
    assert ("direct cause" in capsys.readouterr().err) == is_shown


def test_the_environment_asks_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_FULL_TRACEBACK", "1")
    error = raised(ValueError("x"), "loopwright.trainer.trainer")
    assert files(tracebacks.trimmed(error)) == [__file__, "loopwright.trainer.trainer.py", __file__]
    monkeypatch.setenv("LOOPWRIGHT_FULL_TRACEBACK", "0")
    assert "loopwright.trainer.trainer.py" not in files(tracebacks.trimmed(error))


def test_a_trimmed_traceback_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    tracebacks.show_trimmed()
    error = raised(ValueError("mine"), "loopwright.trainer.trainer", "users.module")
    sys.excepthook(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert "ValueError: mine" in text
    assert "loopwright.trainer" not in text
    assert text.endswith("LOOPWRIGHT_FULL_TRACEBACK=1 shows them)\n")


def test_an_error_may_end_with_a_line_or_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    tracebacks.show_trimmed()
    line, silent = KeyboardInterrupt(), KeyboardInterrupt()
    tracebacks.end_with_line(line, "rank 1 failed")
    tracebacks.end_in_silence(silent)
    for error in (line, silent):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "rank 1 failed\n"


def test_a_hook_of_the_programs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", own)
    tracebacks.show_trimmed()
    assert sys.excepthook is own
