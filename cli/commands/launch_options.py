"""Options of `loopwright launch`, from the command line and from a YAML file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from yaml import YAMLError

from ...errors import ConfigError, Problems, nearest
from ...sagemaker import sagemaker_variables
from .accelerate_config import is_accelerates, translate


@dataclass(frozen=True)
class Option:
    """An option with a value; in a file, a key of the same name.

    Attributes:
        name: Name without the leading dashes.
        metavar: Placeholder of its value in the help.
        help: Description.
        accept: Returns whether a value is valid.
        group: Heading in the help.
        other_names: torchrun's names.
    """

    name: str
    metavar: str
    help: str
    accept: Callable[[str], bool] = bool
    group: str = "processes"
    other_names: tuple[str, ...] = ()


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) >= 1


def _is_range(text: str) -> bool:
    least, _, most = text.partition(":")
    return _is_count(least) and (not most or (_is_count(most) and int(most) >= int(least)))


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


_GROUPS = {
    "processes": "processes",
    "machines": "several machines",
    "faults": "failures and output",
    "trainer": "defaults for Trainer and Fabric arguments (as LT_... variables)",
}
OPTIONS = (
    Option(
        "nproc-per-node",
        "N|auto|cpu|gpu",
        "number of processes on this machine; auto: one per GPU, or per CPU core without GPUs. Default: --devices, "
        "else one per GPU, else 1",
        lambda text: _is_count(text) or text in ("auto", "cpu", "gpu"),
    ),
    Option(
        "nnodes",
        "N|MIN:MAX",
        "number of machines; start the same command on each (default: this machine only)",
        _is_range,
        "machines",
    ),
    Option(
        "ray",
        "ADDRESS",
        "run the program in workers of Ray Train instead: address of the cluster, auto, or local for a new one; "
        "--nproc-per-node times --nnodes is their number",
        bool,
        "machines",
    ),
    Option("node-rank", "R", "index of this machine, from 0", str.isdecimal, "machines"),
    Option("main-address", "HOST", "address of machine 0", bool, "machines", ("master-addr",)),
    Option(
        "main-port",
        "PORT",
        "port on machine 0 (default: 29400)",
        lambda text: _is_count(text) and int(text) < 65536,
        "machines",
        ("master-port",),
    ),
    Option(
        "rdzv-backend",
        "NAME",
        "c10d or etcd-v2: ranks are assigned automatically, and machines may join and leave",
        bool,
        "machines",
    ),
    Option("rdzv-endpoint", "HOST[:PORT]", "rendezvous address", bool, "machines"),
    Option("rdzv-id", "ID", "job name, the same on all machines", bool, "machines"),
    Option("rdzv-conf", "KEY=VALUE,...", "rendezvous settings, such as timeout=60 (seconds)", bool, "machines"),
    Option("local-address", "HOST", "address of this machine for the others", bool, "machines", ("local-addr",)),
    Option("max-restarts", "N", "number of restarts of all processes after a failure", str.isdecimal, "faults"),
    Option("monitor-interval", "SECONDS", "interval between checks of the processes", _is_seconds, "faults"),
    Option("shutdown-timeout", "SECONDS", "time for processes to end after a signal", str.isdecimal, "faults"),
    Option("log-dir", "PATH", "folder for --redirects and --tee; with --ray, its storage path", bool, "faults"),
    Option("redirects", "1|2|3", "write stdout (1), stderr (2) or both to files", bool, "faults"),
    Option("tee", "1|2|3", "as --redirects, and also to the terminal", bool, "faults"),
    Option("accelerator", "NAME", "LT_ACCELERATOR: cpu, gpu, cuda, ...", bool, "trainer"),
    Option("strategy", "NAME", "LT_STRATEGY: ddp, fsdp, ...", bool, "trainer"),
    Option("devices", "N|LIST|auto", "LT_DEVICES: devices per machine", bool, "trainer"),
    Option("num-nodes", "N", "LT_NUM_NODES: the same as --nnodes", _is_count, "trainer"),
    Option("precision", "NAME", "LT_PRECISION: bf16-mixed, 32-true, ...", bool, "trainer"),
)
_PROGRAM_KEYS = ("script", "module", "args")


@dataclass(frozen=True)
class Request:
    """The user's options and program.

    Attributes:
        options: Option name -> value, for given options.
        program: The script and its arguments, or the module and its arguments.
        is_module: Whether to run the program as a module, as `python -m` does.
        is_dry_run: Whether to print the command without running it.
        left_out: What the file says and the launch cannot do.
        ask: File that is to be written after questions; nothing is started.
    """

    options: Mapping[str, str]
    program: tuple[str, ...]
    is_module: bool = False
    is_dry_run: bool = False
    left_out: tuple[str, ...] = ()
    ask: str | None = None


@dataclass
class _Found:
    """The options of one source, and its problems."""

    options: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    is_module: bool = False
    problems: Problems = field(default_factory=Problems)
    left_out: list[str] = field(default_factory=list)

    def add(self, option: Option, text: str, shown: str) -> None:
        """Add a value if it is valid."""
        if option.accept(text):
            self.options[option.name] = text
        else:
            self.problems.add(
                f"Expected {option.metavar} for {shown}, got {text!r}.",
                fix=f"pass {option.metavar}: {option.help}.",
            )


def read_request(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> Request:
    """Return the options of the command line, its --config file, and torchrun's variables, in this order of priority.

    Args:
        arguments: Arguments after `loopwright launch`.
        variables: Environment variables. Kubernetes' training jobs set those of torchrun: PET_NNODES for --nnodes.
            SageMaker's set SM_HOSTS.

    Raises:
        ConfigError: An option or key is unknown, or a value is invalid; all are named.
        SystemExit: --help was given, or an option lacks its value.
    """
    options, program, has_dashes = _split(arguments)
    given, unknown = _parser().parse_known_args(options)
    if given.ask is not None:
        return Request({}, (), ask=given.ask)
    flags = _Found()
    for option in OPTIONS:
        text = getattr(given, option.name.replace("-", "_"))
        if text is not None:
            flags.add(option, text, f"--{option.name}")
    names = [f"--{name}" for option in OPTIONS for name in (option.name, *option.other_names)]
    for word in unknown:
        if word.startswith("-"):
            flags.problems.add(
                f"Expected an option of `loopwright launch`, got {word}"
                f"{nearest(word, [*names, '--config', '--dry-run', '--ask'])}.",
                fix="see `loopwright launch --help`; write your program's options after its name.",
            )
    file = _Found() if given.config is None else _read_file(given.config)
    chosen = {**file.options, **flags.options}
    is_own = "rdzv-endpoint" in chosen or "1" in (chosen.get("nnodes"), chosen.get("num-nodes"))
    environment = _read_variables(variables or {}, has_own_machines=is_own)
    problems = Problems([*flags.problems, *file.problems, *environment.problems])
    if program and file.program and has_dashes:
        program, given.module = [*file.program, *program], file.is_module
    elif not program:
        program, given.module = list(file.program), file.is_module
    if not program and not problems:
        problems.add(
            "Expected a program, got options only.",
            fix="write its name after the options: loopwright launch --nproc-per-node 2 train.py",
        )
    problems.refuse()
    return Request(
        {**environment.options, **file.options, **flags.options},
        tuple(program),
        given.module,
        given.dry_run,
        tuple(file.left_out),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loopwright launch",
        usage="loopwright launch [options] script.py [arguments]\n"
        "       loopwright launch [options] -m module [arguments]\n"
        "       loopwright launch --config file.yaml [options] [-- arguments]\n"
        "       loopwright launch --ask file.yaml",
        description="Start a program in several processes, on one or more machines, through torch's elastic launch or "
        "Ray Train.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--module", action="store_true", help="run the program as a module, as `python -m` does")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with these options as keys, and with script (or module) and args, or a file of `accelerate "
        "config`; the command line has priority",
    )
    parser.add_argument("--ask", metavar="FILE", help="ask for the options, and write FILE for --config")
    parser.add_argument("--dry-run", action="store_true", help="print the command and exit")
    groups = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    for option in OPTIONS:
        flags = [f"--{name}" for name in (option.name, *option.other_names)]
        groups[option.group].add_argument(*flags, metavar=option.metavar, help=option.help)
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return our options, the program with its arguments, and whether `--` separates them.

    The program is the first word that is neither an option nor an option's value. `_` in option names means `-`.
    """
    with_value = {f"--{name}" for option in OPTIONS for name in (option.name, *option.other_names)} | {
        "--config",
        "--ask",
    }
    ours: list[str] = []
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] == "--":
            return ours, list(arguments[index + 1 :]), True
        name, is_joined, value = arguments[index].partition("=")
        name = name.replace("_", "-")
        index += 1
        if name in with_value and not is_joined and index < len(arguments):
            is_joined, value = "=", arguments[index]
            index += 1
        ours.append(f"{name}{is_joined}{value}")
    return ours, list(arguments[index:]), False


def _read_variables(variables: Mapping[str, str], *, has_own_machines: bool) -> _Found:
    """Return the options that torchrun would take from its variables, or that follow from those of a SageMaker job."""
    found = _Found()
    if not has_own_machines:
        of_job = {f"PET_{name}": value for name, value in sagemaker_variables(variables).items()}
        variables = {**of_job, **variables}
    for option in OPTIONS:
        if option.group != "trainer":  # torchrun does not have these
            for name in (option.name, *option.other_names):
                variable = f"PET_{name.upper().replace('-', '_')}"
                if variables.get(variable):
                    found.add(option, variables[variable], variable)
    return found


def _read_file(path: str) -> _Found:
    """Return the options of a YAML file: ours, or one of `accelerate config`."""
    content = _load(path)
    found = _Found()
    by_name = {name: option for option in OPTIONS for name in (option.name, *option.other_names)}
    if is_accelerates(content):
        theirs = translate(content, path)
        found.problems, content, found.left_out = theirs.problems, theirs.others, theirs.left_out
        for name, text in theirs.options.items():
            found.add(by_name[name], text, f"{name} in {path}")
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if value is None or name in _PROGRAM_KEYS:
            continue
        if name in by_name:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found.add(by_name[name], text, f"{key} in {path}")
        else:
            known = [*by_name, *_PROGRAM_KEYS]
            found.problems.add(
                f"Expected a known key in {path}, got {key!r}{nearest(name, known)}.",
                fix=f"use {', '.join(known)}.",
            )
    names = [name for name in ("script", "module") if content.get(name) is not None]
    if len(names) == 2:
        found.problems.add(f"Expected script or module in {path}, got both.", fix="keep one of them.")
    words = content.get("args") or []
    if isinstance(words, str):
        words = shlex.split(words)
    if not isinstance(words, list):
        found.problems.add(
            f"Expected a list or a string for args in {path}, got {words!r}.", fix="write a list or one string."
        )
    elif names:
        found.is_module = names[0] == "module"
        found.program = (str(content[names[0]]), *map(str, words))
    return found


def _load(path: str) -> dict[object, object]:  # the content of a YAML file
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not Path(path).is_file():
        raise ConfigError(
            f"Expected a YAML file, got --config {path!r}, which is not a file.", fix="pass an existing path."
        )
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"Expected readable YAML in --config {path!r}, got: {error}", fix="correct the file."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"Expected keys in --config {path!r}, got {content!r}.", fix="write lines of `key: value`.")
    return dict(content)
