"""Completion in shells."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from loopwright import cli
from loopwright.cli.commands.completion import _OPTIONS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(program: str, line: str) -> list[str]:
    words = line.split(" ")
    program += f"\nCOMP_WORDS=({' '.join(words[:-1])} '{words[-1]}')\nCOMP_CWORD={len(words) - 1}\n_loopwright\n"
    program += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loopwright repo", ["report"]),
        ("loopwright c", ["completion", "checkpoint"]),
        ("loopwright checkpoint d", ["diff"]),
        ("loopwright completion ", ["bash", "zsh", "fish"]),
        ("loopwright doctor --j", ["--json"]),
        ("loopwright --v", ["--version"]),
        ("loopwright checkpoint diff d", ["data.ckpt"]),
        ("loopwright report d", ["data.ckpt"]),
    ],
)
def test_bash_completes_commands_and_options(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.ckpt").touch()
    assert completed(script("bash", capsys), line) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_options_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "data.ckpt").touch()
    (tmp_path / "loopwright.fish").write_text(script("fish", capsys))
    expected = {
        "loopwright repo": ["report"],
        "loopwright checkpoint d": ["diff"],
        "loopwright completion ": ["bash", "fish", "zsh"],
        "loopwright doctor --j": ["--json"],
        "loopwright --v": ["--version"],
        "loopwright checkpoint diff d": ["data.ckpt"],
        "loopwright report d": ["data.ckpt"],
    }
    program = "source loopwright.fish\n" + "".join(f"complete -C '{line}'\necho =\n" for line in expected)
    command = ["fish", "--no-config", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    found = [answer.split("\n") for answer in done.stdout.split("=\n")[:-1]]
    words = [sorted(line.partition("\t")[0] for line in answer if line) for answer in found]
    assert dict(zip(expected, words, strict=True)) == expected
    assert done.stderr == ""


# An interactive zsh in a pseudo-terminal of its own: completion works in its line editor only. What is found is
# written to a file.
_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'autoload -Uz compinit; compinit -u -D; LOAD'
zpty -w shell 'compadd() { local -a found; builtin compadd -O found "$@"; print -rl -- $found >> found'
zpty -w shell 'builtin compadd "$@"; }'
zpty -w shell 'show() { LBUFFER=$asked; : > found; zle complete-word; BUFFER=; mv found answer; }'
zpty -w shell 'zle -C complete-word complete-word _main_complete; zle -N show; bindkey "^T" show; : > ready'
wait_for() { local i; for (( i = 0; i < 500; i++ )); do [[ -e $1 ]] && return; sleep 0.02; done; exit 3; }
wait_for ready
for line in "$@"; do
    zpty -w shell "rm -f ready; asked=${(qq)line}; : > asked-is-set"
    wait_for asked-is-set
    zpty -w -n shell $'\x14'
    wait_for answer
    cat answer
    print =
    rm answer asked-is-set
done
zpty -d shell
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    "load", ["source ./_loopwright", "fpath=(. $fpath); autoload -Uz _loopwright; compdef _loopwright loopwright"]
)
def test_zsh_completes_commands_options_and_files(
    load: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "data.ckpt").touch()
    (tmp_path / "_loopwright").write_text(script("zsh", capsys))
    expected = {
        "loopwright repo": ["report"],
        "loopwright checkpoint d": ["diff"],
        "loopwright completion ": ["bash", "fish", "zsh"],
        "loopwright doctor --j": ["--json"],
        "loopwright --v": ["--version"],
        "loopwright checkpoint diff d": ["data.ckpt"],
        "loopwright report d": ["data.ckpt"],
    }
    command = ["zsh", "-f", "-c", _ZSH.replace("LOAD", load), "zsh", *expected]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    words = [sorted(set(answer.split())) for answer in done.stdout.split("=\n")[:-1]]
    assert dict(zip(expected, words, strict=True)) == expected


@pytest.mark.parametrize("command", ["doctor", "report", "watch"])
def test_each_completed_option_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.run([command, "--help"])
    text = capsys.readouterr().out
    assert [option for option in _OPTIONS[command].split() if option not in text] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(name in text for name in cli._COMMANDS)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
