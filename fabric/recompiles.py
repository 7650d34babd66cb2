"""Detection of functions that torch.compile recompiles repeatedly, with the cause."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from typing import Any

import torch

from .compiling import entry_named

logger = logging.getLogger(__name__)

# Any in this file: torch's records, which have no public class.

MOST = 4
"""Number of recompilations of a function considered normal: a second shape, the last short batch, a changing number."""
MOST_WITH_MODES = 2 * MOST
"""The same, including recompilations for training and evaluation."""

# The tests are not included, although they may be in the same tree.
_OWN = tuple(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), one, "") for one in
             ("trainer", "fabric", "strategies", "callbacks", "data", "loggers", "precision"))  # fmt: skip
# Each of these causes occurs once per mode.
_MODES = ("GLOBAL_STATE changed", "requires_grad mismatch", ".training", "torch_function", "dispatch key set")
_ADVICE = (
    (
        ("size mismatch", "stride mismatch", "rank mismatch", "Eq(", "Ne(", ".size(", "shape"),
        "Shapes change: pad batches to one length, drop the last short one (DataLoader(drop_last=True)), or pass "
        "compile={'dynamic': True}",
    ),
    (
        ("dtype mismatch", "type mismatch", "___check_type_id", "___check_obj_id", "device"),
        "Pass objects of one type, dtype and device in every step, or exclude the function that uses them with "
        "@torch.compiler.disable",
    ),
    (
        (" == ", "EQUALS_MATCH"),
        "A Python value changes: store it in a tensor (register_buffer), or read it outside the compiled function",
    ),
)
_OTHERWISE = "Keep it constant over steps, or exclude the function that reads it with @torch.compiler.disable"


class RecompileWatch:
    """Logs one warning for each function that is compiled more often than a run normally requires.

    It has no cost per step: torch calls it after each compilation.

    Args:
        is_rank_zero: Whether to log the warning. Other ranks recompile for the same reasons.

    Attributes:
        num_compiled: Number of compilations since `start`.
        num_recompiled: How many of them were of functions that had been compiled before.
        last_cause: Why the last of these was necessary; "" without any.
        seconds: Seconds of all of them.
    """

    def __init__(self, *, is_rank_zero: bool = True) -> None:
        self._is_rank_zero = is_rank_zero
        self._last: Any = None
        self._causes: dict[tuple[Any, ...], list[str]] = {}
        self._said: set[tuple[Any, ...]] = set()
        self._cache_before = (0, 0)
        self.num_compiled = self.num_recompiled = 0
        self.last_cause = ""
        self.seconds = 0.0

    def start(self, stack: ExitStack) -> None:
        """Watch until the stack is closed."""
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import get_compilation_metrics

        records = get_compilation_metrics()
        self._last = records[-1] if records else None
        self._cache_before = _cache_counts()
        callback_handler.register_start_callback(self._look)
        stack.callback(self._look)
        stack.callback(callback_handler.remove_start_callback, self._look)

    @property
    def num_cached(self) -> int:
        """How many parts of graphs (forward, backward) inductor has read from its cache."""
        return _cache_counts()[0] - self._cache_before[0]

    @property
    def num_uncached(self) -> int:
        """How many parts of graphs inductor has compiled."""
        return _cache_counts()[1] - self._cache_before[1]

    def look(self) -> None:
        """Count what has been compiled until now; otherwise this is done when the next compilation begins."""
        self._look()

    def _look(self, _: object = None) -> None:
        from torch._dynamo.utils import get_compilation_metrics

        fresh = []
        records = get_compilation_metrics()
        for record in reversed(records):
            if record is self._last:
                break
            fresh.append(record)
        self._last = records[-1] if records else None
        for record in reversed(fresh):
            self.seconds += (getattr(record, "duration_us", None) or 0) / 1e6
            if record.co_filename is None:  # the limit of torch was reached: it runs the function uncompiled
                continue
            # A backward pass that is compiled when it is first needed is a part of a graph that was counted.
            self.num_compiled += record.is_forward is not False
            if record.recompile_reason:
                self.num_recompiled += 1
                self._judge(record)

    def _judge(self, record: Any) -> None:
        key = (record.co_filename, record.co_firstlineno, record.co_name)
        entry = entry_named(record.co_name)
        if entry is None and os.path.abspath(record.co_filename).startswith(_OWN):
            return  # a function of this package that torch compiled outside a graph
        cause = _cause(record.recompile_reason, entry[1] if entry is not None else [])
        causes = self._causes.setdefault(key, [])
        causes.append(cause)
        self.last_cause = cause
        # Recompilations that depend on the mode end once each mode has run, so they count only above a higher limit.
        changing = [one for one in causes if not any(sign in one for sign in _MODES)]
        is_storm = len(changing) > MOST or len(causes) > MOST_WITH_MODES
        if not is_storm or key in self._said or not self._is_rank_zero:
            return
        self._said.add(key)
        cause = changing[-1] if changing else cause
        advice = next((text for signs, text in _ADVICE if any(sign in cause for sign in signs)), _OTHERWISE)
        logger.warning(
            "torch.compile has compiled %s %d times because its inputs keep changing. After %d compilations torch "
            "runs it uncompiled. Last change: %s. %s. TORCH_LOGS=recompiles lists every change",
            _described(*key),
            len(causes) + 1,
            torch._dynamo.config.recompile_limit,
            cause,
            advice,
        )


def _cache_counts() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def _cause(reason: str, arguments: list[str]) -> str:
    """Return the first line of torch's reason, with the names of arguments and without hints on torch's settings."""
    line = reason.strip().splitlines()[0]
    line = re.sub(r"^\d+/\d+: ", "", line)
    line = re.split(r"\s+# |\s+\(HINT", line)[0].strip().rstrip(".")
    for index, name in enumerate(arguments):
        line = line.replace(f"args[{index}]", name)
    return re.sub(r"kwargs\['(\w+)'\]", r"\1", line)


def _described(filename: str, line: int, name: str) -> str:
    entry = entry_named(name)
    if entry is not None:
        return f"{entry[0]}.forward"
    name = re.sub(r"^torch_dynamo_resume_in_|_at_\d+$", "", name)
    return f"{name} ({os.path.basename(filename)}:{line})"
