"""Output of `loopwright checkpoint`: a checkpoint as text or JSON, and progress."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any

from ...checkpoint.tensors import flatten, is_tensor
from ...checkpoint.tools.formats import Opened
from ...checkpoint.tools.inspection import describe, describe_tensors

_EVERY_S = 0.2
_LONGEST = 100
_WIDEST = 60


def inspect_json(opened: Opened, *, has_tensors: bool, prefix: str | None) -> str:
    """Return a checkpoint's content as JSON with a trailing line break."""
    found = describe(opened)
    if has_tensors or prefix is not None:
        found["tensors"] = describe_tensors(opened, prefix or "")
    if prefix is not None:
        found["values"] = {path: _plain(value) for path, value in _values(opened, prefix)}
    return json.dumps(found, indent=2, default=str, allow_nan=True) + "\n"


def inspect_text(opened: Opened, *, has_tensors: bool, prefix: str | None) -> str:
    """Return a checkpoint's content as lines for a terminal."""
    lines: list[str] = []
    if prefix is None or has_tensors:
        lines += _overview(describe(opened))
    if has_tensors or prefix is not None:
        tensors = describe_tensors(opened, prefix or "")
        width = min(_WIDEST, max((len(entry["path"]) for entry in tensors), default=0))
        for entry in tensors:
            shape = "x".join(map(str, entry["shape"])) or "scalar"
            same = f"  same as {entry['same_as']}" if "same_as" in entry else ""
            size = show_bytes(entry["size_bytes"])
            lines.append(f"  {entry['path']:{width}}  {entry['dtype']:>8}  {shape:>14}  {size:>8}{same}")
    if prefix is not None:
        lines += [f"  {path}: {_short(value)}" for path, value in _values(opened, prefix)]
        if not lines:
            lines = [f"nothing below {prefix!r}; top-level keys: {', '.join(map(str, opened.tree))}"]
    return "\n".join(lines) + "\n"


def show_bytes(count: int) -> str:
    """Return a human-readable number of bytes."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class ByteMeter:
    """Context manager that shows the number of processed bytes on a terminal's error output.

    Args:
        verb: What is done with the bytes: "written".
        total: How many bytes there are; None if unknown.
    """

    def __init__(self, verb: str, total: int | None) -> None:
        self._verb = verb
        self._total = total
        self._done = 0
        self._shown_at = 0.0
        self._is_shown = False
        self._has_terminal = sys.stderr.isatty()

    def __enter__(self) -> ByteMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()

    def advance(self, count: int) -> None:
        """Add processed bytes, and show the sum from time to time."""
        self._done += count
        now = time.monotonic()
        if self._has_terminal and now - self._shown_at >= _EVERY_S:
            self._shown_at = now
            self._is_shown = True
            of_all = "" if self._total is None else f" of {show_bytes(self._total)}"
            sys.stderr.write(f"\r{self._verb} {show_bytes(self._done)}{of_all}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line before other output."""
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _overview(found: dict[str, Any]) -> list[str]:  # Any: JSON of describe
    size = f", {show_bytes(found['size_bytes'])}" if "size_bytes" in found else ""
    lines = [f"{found['path']}: {found['form']}{size}"]
    written = dict(found.get("written_by", {}))
    mesh = written.pop("mesh", None)
    if mesh is not None:
        dims = mesh["dims"] or [f"dim {number}" for number in range(len(mesh["shape"]))]
        written["mesh"] = " x ".join(f"{name}={size}" for name, size in zip(dims, mesh["shape"], strict=True))
    lines += _row("written by", ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in written.items()))
    counts = found.get("counts", {})
    lines += _row("counts", ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in counts.items()))
    if weights := found.get("weights"):
        text = f"{weights['tensors']} tensors, {weights['elements']:,} elements, {show_bytes(weights['size_bytes'])}"
        lines += _row("weights", f"{text}, {weights['tied']} tied" if weights["tied"] else text)
        for dtype, entry in weights["by_dtype"].items():
            lines += _row("", f"{dtype}: {entry['elements']:,} elements, {show_bytes(entry['size_bytes'])}")
    for number, optimizer in enumerate(found.get("optimizers", [])):
        lines += _optimizer_rows(number, optimizer)
    for number, scheduler in enumerate(found.get("schedulers", [])):
        lines += _row(f"scheduler {number}", _entries(scheduler))
    lines += _block("callbacks", found.get("callbacks", []))
    for key, title in (
        ("hyper_parameters", "hparams"),
        ("datamodule_hyper_parameters", "data hparams"),
        ("data", "data"),
        ("metadata", "metadata"),
    ):
        lines += _block(title, [f"{name} = {_short(value)}" for name, value in found.get(key, {}).items()])
    lines += _row("states", ", ".join(found.get("states", [])))
    lines += _row("other", ", ".join(found.get("other_entries", [])))
    lines += _block("omitted", [f"{path}: not a plain value" for path in found.get("left_out", [])])
    return lines


def _optimizer_rows(number: int, optimizer: dict[str, Any]) -> list[str]:  # Any: JSON
    if "note" in optimizer:
        return _row(f"optimizer {number}", optimizer["note"])
    kind = f"{optimizer['looks_like']}, inferred from its state; " if "looks_like" in optimizer else ""
    size = f"{optimizer['parameters_with_state']} parameters with state, {show_bytes(optimizer['size_bytes'])}"
    lines = _row(f"optimizer {number}", kind + size)
    for group in optimizer["groups"]:
        known = {key: value for key, value in group.items() if key != "params" and value not in (None, False)}
        lines += _row("", f"{group['params']} parameters: {_entries(known)}")
    return lines


def _row(title: str, text: str) -> list[str]:
    return [f"  {title:<13} {text}"] if text else []


def _block(title: str, items: list[str]) -> list[str]:
    return [line for number, item in enumerate(items) for line in _row("" if number else title, item)]


def _entries(values: dict[str, Any]) -> str:  # Any: JSON
    return ", ".join(f"{key}={_short(value)}" for key, value in values.items())


def _values(opened: Opened, prefix: str) -> list[tuple[str, Any]]:  # Any: plain values
    return [(path, value) for path, value in flatten(opened.tree) if path.startswith(prefix) and not is_tensor(value)]


def _plain(value: object) -> Any:  # Any: a plain value; JSON
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
