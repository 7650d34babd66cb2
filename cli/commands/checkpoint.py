"""`loopwright checkpoint`: inspects, verifies, compares and converts checkpoints; options, output and exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...checkpoint.file.remote import Remote, as_local
from ...checkpoint.tensors import size_bytes, tensors_in
from ...checkpoint.tools.convert import FORMATS, guess_format, rename, weights_of, without_training, write_as
from ...checkpoint.tools.diff import Tolerance, compare
from ...checkpoint.tools.formats import Opened, Reading, find_checkpoints, is_checkpoint_folder, open_checkpoint
from ...checkpoint.tools.inspection import disk_bytes
from ...checkpoint.tools.verify import check
from ...errors import CheckpointError, ConfigError, LoopwrightError
from ...messages import fitted
from .checkpoint_text import ByteMeter, inspect_json, inspect_text, show_bytes

if TYPE_CHECKING:
    from pathlib import Path


_COMMANDS = {
    "inspect": "show a checkpoint's content: versions, counts, weights, optimizers, hyperparameters",
    "verify": "read every byte and compare it with the checksums; report damage",
    "diff": "compare two checkpoints: keys, shapes, values of tensors, plain values",
    "convert": "convert to another format: one file, sharded, safetensors, state dict, Lightning, DeepSpeed",
    "consolidate": "write a sharded checkpoint as one file",
}
_FOLDER_FORMATS = (
    "sharded checkpoint", "Lightning sharded checkpoint", "DCP folder", "DeepSpeed folder",
    "DeepSpeed universal folder",
)  # fmt: skip
_EXIT_CODES = "Exit codes: 0 success; 1 damaged or different; 2 error."


def checkpoint(arguments: Sequence[str]) -> int:
    """Run `loopwright checkpoint` and return the exit code.

    Args:
        arguments: Arguments after `loopwright checkpoint`.
    """
    parser = argparse.ArgumentParser(
        prog="loopwright checkpoint",
        description="Inspect, verify, compare and convert checkpoints. Input formats: files and sharded folders of "
        "Loopwright and Lightning, folders of torch.distributed.checkpoint and DeepSpeed, state dicts of torch.save, "
        "and safetensors. Code in files is never executed, unless --trust is given.",
        epilog=f"{_EXIT_CODES} See `loopwright checkpoint COMMAND --help` for examples.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_convert(commands)
    _add_consolidate(commands)
    given = parser.parse_args(arguments)
    if given.command == "diff" and (given.rtol < 0 or given.atol < 0):
        commands.choices["diff"].error("--rtol and --atol must not be negative")
    if given.command == "convert" and given.shards < 1:
        commands.choices["convert"].error(f"--shards {given.shards}: expected 1 or more")
    try:
        work: Callable[[argparse.Namespace], int] = given.work
        return work(given)
    except (LoopwrightError, OSError) as error:
        sys.stderr.write(f"loopwright checkpoint {given.command}: {error}\n")
        return 2


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=_COMMANDS[name],
        description=fitted(f"{_COMMANDS[name][0].upper()}{_COMMANDS[name][1:]}."),
        epilog=f"examples:\n{examples}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop-objects", action="store_true", help="omit entries that are not tensors or plain values, and list them"
    )
    parser.add_argument(
        "--trust", action="store_true",
        help="unpickle files that cannot be read safely: such a file can run any code on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--weights-key", metavar="KEY", help="path of the weights in a file of another program: model, ema/model"
    )


def _reading(given: argparse.Namespace, *, verify: bool) -> Reading:
    if given.trust:
        sys.stderr.write(
            f"loopwright checkpoint {given.command}: --trust unpickles objects in files, which can run any code "
            "of their authors\n"
        )
    return Reading(trust=given.trust, drop_objects=given.drop_objects, weights_key=given.weights_key, verify=verify)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "inspect",
        "  loopwright checkpoint inspect last.ckpt\n"
        "  loopwright checkpoint inspect last.ckpt --tensors --key state_dict/encoder\n"
        "  loopwright checkpoint inspect last.ckpt --json | jq .counts.global_step\n",
    )
    parser.add_argument("path", metavar="PATH", help="file, folder or URL; tensors are not read")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: path, shape, dtype, bytes")
    parser.add_argument("--key", metavar="PREFIX", help="list the tensors and plain values below a path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_reading(parser)
    parser.set_defaults(work=_inspect)


def _inspect(given: argparse.Namespace) -> int:
    opened = open_checkpoint(given.path, _inspecting(given))
    show = inspect_json if given.json else inspect_text
    sys.stdout.write(show(opened, has_tensors=given.tensors, prefix=given.key))
    return 0


def _inspecting(given: argparse.Namespace) -> Reading:
    # Inspection changes nothing: entries that are not plain values are listed, without an error.
    return dataclasses.replace(_reading(given, verify=False), drop_objects=True)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "verify",
        "  loopwright checkpoint verify last.ckpt\n"
        "  loopwright checkpoint verify checkpoints/        every checkpoint directly in the folder\n",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH",
        help="a checkpoint, or a folder: then each file in it that ends in .ckpt, .pt, .pth or .safetensors and each "
        "checkpoint folder in it (without hidden ones and subfolders)",
    )  # fmt: skip
    parser.set_defaults(work=_verify)


def _verify(given: argparse.Namespace) -> int:
    paths = [path for named in given.paths for path in _each(named)]
    if not paths:
        raise ConfigError(f"Expected a checkpoint in {', '.join(given.paths)}, got none.", fix="pass the path of one.")
    codes = {0}
    for path in paths:
        try:
            with ByteMeter(f"{path}: read", disk_bytes(path)) as meter:
                compared = check(path, meter.advance)
            sys.stdout.write(f"{path}: ok, {compared}\n")
        except LoopwrightError as error:
            # A file that the system does not let us read may be intact.
            is_unread = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, OSError)
            if is_unread or not isinstance(error, CheckpointError):
                sys.stderr.write(f"loopwright checkpoint verify: {error}\n")
                codes.add(2)
            else:
                sys.stdout.write(f"{path}: DAMAGED\n  {error.what}\n")
                codes.add(1)
        sys.stdout.flush()  # each takes long: show its line at once
    return max(codes)


def _each(path: str) -> Sequence[str | Path]:
    local = as_local(path)
    if local is None:
        Remote(path)  # an invalid address is not a damaged checkpoint
    if local is None or not local.is_dir() or is_checkpoint_folder(local):
        return [path]
    return find_checkpoints(local)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "diff",
        "  loopwright checkpoint diff a.ckpt b.ckpt\n"
        "  loopwright checkpoint diff a.ckpt folder.ckpt --weights-only --rtol 1e-5 --atol 1e-8\n",
    )
    parser.add_argument("first", metavar="A", help="a checkpoint of any format")
    parser.add_argument("second", metavar="B", help="a checkpoint of the same or another format")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance for floats (default 0: bitwise)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance for floats (default 0: bitwise)")
    parser.add_argument(
        "--values", type=int, default=3, metavar="N", help="number of elements to show per tensor (default 3)"
    )
    parser.add_argument("--weights-only", action="store_true", help="compare state_dict only")
    _add_reading(parser)
    parser.set_defaults(work=_diff)


def _diff(given: argparse.Namespace) -> int:
    how = _reading(given, verify=False)
    opened = [open_checkpoint(path, how) for path in (given.first, given.second)]
    trees = [{"state_dict": weights_of(one)} if given.weights_only else one.tree for one in opened]
    total = sum(size_bytes(tensor) for _, tensor in tensors_in(trees[0]))
    kinds: dict[str, int] = {}
    lines: list[str] = []
    with ByteMeter("compared", total) as meter:
        for found in compare(
            trees[0],
            trees[1],
            Tolerance(given.rtol, given.atol),
            num_values=max(0, given.values),
            advance=meter.advance,
        ):
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
            lines.append(f"{found.kind:9} {found.path}: {found.detail}\n")
    if not kinds:
        sys.stdout.write("equal\n" if not (given.rtol or given.atol) else "equal within the tolerance\n")
        return 0
    sys.stdout.write(f"{sum(kinds.values())} differ: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}\n")
    sys.stdout.writelines(lines)
    return 1


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "convert",
        "  loopwright checkpoint convert last.ckpt weights.safetensors\n"
        "  loopwright checkpoint convert weights.safetensors model.ckpt --map model.=net.\n"
        "  loopwright checkpoint convert lightning-folder/ resumed.ckpt\n"
        "  loopwright checkpoint convert last.ckpt for-lightning.ckpt --to lightning\n"
        "  loopwright checkpoint convert last.ckpt sharded.ckpt --to sharded --shards 8\n"
        "  loopwright checkpoint convert last.ckpt folder/ --to deepspeed\n",
    )
    parser.add_argument("source", metavar="IN", help="a checkpoint of any format")
    parser.add_argument("target", metavar="OUT", help="file, folder or URL to write")
    parser.add_argument(
        "--to", choices=FORMATS, metavar="FORMAT",
        help="checkpoint: Loopwright's file; sharded: Loopwright's folder; safetensors and state-dict: weights only; "
        "lightning: Lightning's file; deepspeed: DeepSpeed's universal checkpoint, a folder. Default: by OUT's suffix "
        "(.ckpt, .safetensors, .pt, .pth)",
    )  # fmt: skip
    parser.add_argument(
        "--shards", type=int, default=1, metavar="N", help="number of files of a sharded checkpoint (default 1)"
    )
    parser.add_argument(
        "--map", action="append", default=[], metavar="OLD=NEW", help="replace the prefix OLD of weight names with NEW"
    )
    parser.add_argument("--weights-only", action="store_true", help="omit the training state")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    _add_reading(parser)
    parser.set_defaults(work=_convert)


def _convert(given: argparse.Namespace) -> int:
    to = given.to or guess_format(given.target)
    pairs = [text.partition("=") for text in given.map]
    wrong = [text for text, pair in zip(given.map, pairs, strict=True) if not pair[1]]
    if wrong:
        raise ConfigError(
            f"Expected --map OLD=NEW, got {', '.join(wrong)}.", fix="pass --map model.=net. for instance."
        )
    _refuse_target(given)
    opened = open_checkpoint(given.source, _reading(given, verify=True))
    opened = rename(opened, [(old, new) for old, _, new in pairs])
    if given.weights_only:
        opened = without_training(opened)
    return _write(given, opened, to, num_shards=given.shards)


def _write(given: argparse.Namespace, opened: object, to: str, *, num_shards: int = 1) -> int:
    assert isinstance(opened, Opened)
    tree = {"state_dict": weights_of(opened)} if to in ("safetensors", "state-dict") else opened.tree
    total = sum(size_bytes(tensor) for _, tensor in tensors_in(tree))
    with ByteMeter("written", total) as meter:
        write_as(opened, given.target, to, num_shards=num_shards, advance=meter.advance)
    for path in opened.dropped:
        sys.stderr.write(f"loopwright checkpoint {given.command}: omitted {path}, which is not a plain value\n")
    size = disk_bytes(given.target)
    said = f", {show_bytes(size)}" if size is not None else ""
    sys.stdout.write(f"{given.target}: {to}{said}, from {given.source} ({opened.format})\n")
    return 0


def _refuse_target(given: argparse.Namespace) -> None:
    local, source = as_local(given.target), as_local(given.source)
    if _lies_in(given.target, given.source) or _lies_in(given.source, given.target):
        raise ConfigError(
            f"Expected an output outside of the input and vice versa, got {given.target!r} and {given.source!r}.",
            fix="pass an output path outside: the content of a checkpoint folder is deleted when it is replaced.",
        )
    if local is None:
        remote = Remote(given.target)
        is_there = remote.exists() or remote.is_folder()
    else:
        is_there = local.exists() or local.is_symlink()
        if source is not None and is_there and source.exists() and local.resolve() == source.resolve():
            raise ConfigError(
                f"Expected an output other than the input, got {given.target!r}.", fix="pass another path."
            )
    if is_there and not given.force:
        raise ConfigError(
            f"Expected a new path, got {given.target!r}, which exists.",
            fix="pass another path, or --force to replace it.",
        )


def _lies_in(path: str, folder: str) -> bool:
    """Return whether a path or URL is below another one."""
    local, above = as_local(path), as_local(folder)
    if local is not None and above is not None:
        return above.resolve() in local.resolve().parents
    return local is above is None and path.startswith(folder.rstrip("/") + "/")


def _add_consolidate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "consolidate",
        "  loopwright checkpoint consolidate sharded.ckpt full.ckpt              with optimizer states\n"
        "  loopwright checkpoint consolidate sharded.ckpt weights.safetensors    weights only\n"
        "  loopwright checkpoint consolidate deepspeed-folder/ full.ckpt         with optimizer states\n",
    )
    parser.add_argument(
        "source", metavar="FOLDER", help="a sharded checkpoint of Loopwright, Lightning, DCP or DeepSpeed"
    )
    parser.add_argument("target", metavar="OUT", help="file that ends in .ckpt, .safetensors, .pt or .pth, or a URL")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    _add_reading(parser)
    parser.set_defaults(work=_consolidate)


def _consolidate(given: argparse.Namespace) -> int:
    to = guess_format(given.target)
    _refuse_target(given)
    opened = open_checkpoint(given.source, _reading(given, verify=True))
    if opened.format not in _FOLDER_FORMATS:
        raise ConfigError(
            f"Expected a sharded checkpoint, got {given.source!r}, a {opened.format} in one file.",
            fix="use `loopwright checkpoint convert`.",
        )
    return _write(given, opened, to)
