"""`loopwright completion bash|zsh|fish`: scripts that let a shell complete commands, options and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

# The second words of commands. After the other commands, files are completed.
_SUBCOMMANDS = {
    "checkpoint": "inspect verify diff convert consolidate",
    "completion": "bash zsh fish",
    "migrate": "check",
    "recipe": "tokenizer pretrain finetune plan chat generate evaluate export",
}
_OPTIONS = {
    "fit": "--config --print-config --ckpt_path --model --data --help",
    "validate": "--config --print-config --ckpt_path --model --data --help",
    "test": "--config --print-config --ckpt_path --model --data --help",
    "predict": "--config --print-config --ckpt_path --model --data --help",
    "doctor": "--folder --disk-size --timeout --json --nnodes --nproc-per-node --node-rank --main-address --main-port "
    "--rdzv-endpoint --accelerator --help",
    "plan": "--devices --num-nodes --memory --bandwidth --tokens --peak-flops --price-per-hour --dry-run --json --help",
    "replay": "--step --compare --save-batch --debug --rank --anomaly --folder --json --help",
    "report": "--output --title --smoothing --no-checkpoints --help",
    "run-accelerate": "--num-processes --cpu --mixed-precision --config --module --help",
    "run-lightning": "--parity --help",
    "watch": "--every --metric --once --smoothing --help",
}
_OF_ALL = "--help"
_HOW = {
    "bash": 'eval "$(loopwright completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(loopwright completion zsh)" in ~/.zshrc, after compinit',
    "fish": "loopwright completion fish > ~/.config/fish/completions/loopwright.fish",
}


def completion(arguments: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print the script of a shell; return the exit code.

    Args:
        arguments: Arguments after `loopwright completion`.
        commands: The commands to complete, each with its description.
    """
    parser = argparse.ArgumentParser(
        prog="loopwright completion",
        description="Print a script that lets a shell complete commands and options.",
        epilog="use it:\n" + "\n".join(f"  {shell}: {how}" for shell, how in _HOW.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=list(_HOW), help="shell for which the script is printed")
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[parser.parse_args(arguments).shell]
    sys.stdout.write(script(commands))
    return 0


def _bash(commands: Mapping[str, str]) -> str:
    subcommands, options = _cases('words="{}"', _SUBCOMMANDS), _cases('words="{}"', _OPTIONS)
    return f"""# bash completion of loopwright
_loopwright() {{
    local words="" current="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(commands)} --help --version"
    elif [[ "$current" == -* ]]; then
        words="{_OF_ALL}"
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    elif [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
{subcommands}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ -n "$words" ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _loopwright loopwright
"""


def _zsh(commands: Mapping[str, str]) -> str:
    named = "\n".join(f"        {_quoted(f'{name}:{text}')}" for name, text in commands.items())
    subcommands, options = _cases("found=({})", _SUBCOMMANDS), _cases("found=({})", _OPTIONS)
    return f"""#compdef loopwright
# zsh completion of loopwright
_loopwright() {{
    local -a commands found
    commands=(
{named}
    )
    if [[ "$PREFIX" == -* ]]; then
        found=({_OF_ALL})
        (( CURRENT == 2 )) && found=(--help --version)
        case "$words[2]" in
{options}
        esac
    elif (( CURRENT == 2 )); then
        _describe 'command' commands
        return
    elif (( CURRENT == 3 )); then
        case "$words[2]" in
{subcommands}
        esac
    fi
    if (( $#found )); then
        compadd -- $found
    else
        _files
    fi
}}
# The file is either sourced, or loaded from $fpath at the first completion.
if [[ "$funcstack[1]" == _loopwright ]]; then
    _loopwright "$@"
else
    compdef _loopwright loopwright
fi
"""


def _fish(commands: Mapping[str, str]) -> str:
    lines = ["# fish completion of loopwright"]
    lines += [
        f"complete -c loopwright -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
        for name, text in commands.items()
    ]
    lines += [
        "complete -c loopwright -l help -d 'show help'",
        "complete -c loopwright -n __fish_use_subcommand -l version -d 'show the version'",
    ]
    for name, words in _SUBCOMMANDS.items():
        is_second = f"'__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {words}'"
        lines.append(f"complete -c loopwright -n {is_second} -f -a '{words}'")
    for name, words in _OPTIONS.items():
        lines += [
            f"complete -c loopwright -n '__fish_seen_subcommand_from {name}' -l {word[2:]}"
            for word in words.split()
            if word != _OF_ALL
        ]
    return "\n".join(lines) + "\n"


def _cases(action: str, words: Mapping[str, str]) -> str:
    """Return the branches of a `case`, one for each command."""
    return "\n".join(f"            {name}) {action.format(of_command)} ;;" for name, of_command in words.items())


def _quoted(text: str) -> str:
    escaped = text.replace("'", "'\\''")
    return f"'{escaped}'"
