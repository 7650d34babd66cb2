"""Every option of every command has a text in `--help`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from collections.abc import Iterator

import pytest

from loopwright.cli import _COMMANDS, run
from loopwright.cli.commands.completion import _SUBCOMMANDS

CALLS = [
    [],
    *([command] for command in _COMMANDS),
    *([command, word] for command, words in _SUBCOMMANDS.items() for word in words.split()),
]
SETTINGS = [["fit", "--help", "trainer"], ["recipe", "finetune", "--help", "lora"]]


def untold(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of a parser's options, positional arguments and subcommands without a text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (f"{parser.prog} {one.dest}" for one in action._choices_actions if not one.help)
            for child in action.choices.values():
                yield from untold(child)
        elif not action.help or action.help is argparse.SUPPRESS:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"


def bare_lines(text: str) -> Iterator[str]:
    """Lines of options and settings without a text, where a command writes its help without argparse."""
    lines = [*text.splitlines(), ""]
    for line, following in itertools.pairwise(lines):
        is_option = line.startswith("  -") and not re.search(r"\S {2,}\S", line.strip())
        is_setting = re.match(r"  [\w.]+: .*\((default|required)", line)
        if (is_option or is_setting) and not re.match(r" {6}(?!See `)", following):
            yield line.strip()


@pytest.mark.parametrize("call", [*([*call, "--help"] for call in CALLS), *SETTINGS], ids=" ".join)
def test_every_option_has_a_text(
    call: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsers: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_known_args

    def recorded(self: argparse.ArgumentParser, *arguments: object, **more: object) -> object:
        parsers.append(self)
        return parse(self, *arguments, **more)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", recorded)
    with contextlib.suppress(SystemExit):
        assert run(call) == 0
    text = capsys.readouterr().out
    assert "usage:" in text or call in SETTINGS
    assert [name for parser in parsers for name in untold(parser)] == []
    assert list(bare_lines(text)) == []
    assert parsers or re.search(r"^  (-|[\w.]+: )", text, re.MULTILINE) or call == ["recipe", "--help"]


def test_an_option_without_a_text_is_found() -> None:
    parser = argparse.ArgumentParser(prog="p")
    parser.add_argument("--bare")
    commands = parser.add_subparsers()
    commands.add_parser("child", help="a text").add_argument("word")
    assert list(untold(parser)) == ["p --bare", "p child word"]
    assert list(bare_lines("  --bare NAME\n  lr: float (default 0.1)\n  -x   a text")) == [
        "--bare NAME", "lr: float (default 0.1)",
    ]  # fmt: skip
