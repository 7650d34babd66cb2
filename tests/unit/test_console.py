"""What the logger `loopwright` writes to standard error."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from loopwright import console

LOGGER = logging.getLogger("loopwright")
CHILD = logging.getLogger("loopwright.trainer.fit_lines")


class Written:
    """What was written to standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def getvalue(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """Give a standard error; logging is not configured, as in a user's program."""
    find = console._handlers
    monkeypatch.setattr(
        console, "_handlers", lambda: [one for one in find() if not type(one).__module__.startswith("_pytest")]
    )
    yield Written(capsys)
    console.withdraw()
    console.LINES.above = None
    for logger in (logging.getLogger(), LOGGER):
        for handler in list(logger.handlers):
            if not type(handler).__module__.startswith("_pytest"):
                logger.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_information_is_shown_once_without_configuration(stream: Written) -> None:
    console.show_logs()
    console.show_logs()
    CHILD.info("trains on %s", "cpu")
    CHILD.debug("details")
    assert stream.getvalue() == "trains on cpu\n"


def test_a_warning_is_labeled(stream: Written) -> None:
    console.show_logs()
    CHILD.warning("look here")
    assert stream.getvalue() == "warning: look here\n"


def test_nothing_is_doubled_where_the_root_logger_has_a_handler(stream: Written) -> None:
    own = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(own))
    console.show_logs()
    CHILD.warning("once")
    assert (stream.getvalue(), own.getvalue()) == ("", "once\n")


def test_configuration_after_the_first_run_takes_over(stream: Written) -> None:
    console.show_logs()
    own = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(own))
    CHILD.warning("once")
    console.show_logs()
    CHILD.info("below the root's level")
    assert (stream.getvalue(), own.getvalue()) == ("", "once\n")
    assert LOGGER.level == logging.NOTSET


def test_a_handler_of_the_programs_at_loopwright_takes_over(stream: Written) -> None:
    LOGGER.addHandler(logging.NullHandler())
    console.show_logs()
    CHILD.info("nothing")
    assert stream.getvalue() == ""


def test_a_level_of_the_programs_stays(stream: Written) -> None:
    LOGGER.setLevel(logging.WARNING)
    console.show_logs()
    CHILD.info("nothing")
    CHILD.warning("something")
    assert stream.getvalue() == "warning: something\n"
    console.withdraw()
    assert LOGGER.level == logging.WARNING


@pytest.mark.parametrize(
    ("level", "expected"), [("off", ""), ("warning", "warning: w\n"), ("debug", "d\ni\nwarning: w\n")]
)
def test_the_environment_sets_the_level(
    stream: Written, monkeypatch: pytest.MonkeyPatch, level: str, expected: str
) -> None:
    monkeypatch.setenv("LOOPWRIGHT_LOG_LEVEL", level)
    console.show_logs()
    CHILD.debug("d")
    CHILD.info("i")
    CHILD.warning("w")
    assert stream.getvalue() == expected


def test_an_unknown_level_is_named(stream: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_LOG_LEVEL", "warn")
    with pytest.warns(UserWarning, match="'warn', which is none of debug, info, warning, error, off"):
        console.show_logs()
    CHILD.info("i")
    assert stream.getvalue() == "i\n"


def test_other_ranks_only_warn(stream: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    console.show_logs()
    CHILD.info("nothing")
    CHILD.warning("of this rank")
    assert stream.getvalue() == "warning: of this rank\n"


def test_records_for_logs_alone_are_not_shown(stream: Written) -> None:
    console.show_logs()
    CHILD.warning("the last line says it", extra=console.ONLY_LOGS)
    assert stream.getvalue() == ""


def test_lines_stand_above_a_bar_on_a_terminal(stream: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    above: list[str] = []
    console.show_logs()
    console.LINES.above = above.append
    CHILD.info("into a file")
    in_file = stream.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    CHILD.info("onto the screen")
    assert (in_file, above) == ("into a file\n", ["onto the screen\n"])


def test_terminals_get_colors_unless_the_user_refuses(stream: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console.show_logs()
    CHILD.warning("a")
    monkeypatch.setenv("NO_COLOR", "1")
    CHILD.warning("b")
    assert terminal.getvalue() == "\x1b[33mwarning:\x1b[0m a\nwarning: b\n"
