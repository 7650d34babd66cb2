"""`run_in_child`: calls a function in a separate process, whose changes and imports end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar, cast

import torch

from ..errors import LaunchError

T = TypeVar("T")


def run_in_child(function: Callable[[], T]) -> T:
    """Return the result of a function in a copy of this process; if processes cannot be copied, call it here.

    Args:
        function: The function; its result must be picklable.

    Raises:
        LaunchError: The process ended without a result.
        Exception: Of the function, with its traceback as a note.
    """
    if not hasattr(os, "fork") or multiprocessing.current_process().daemon:
        return function()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, sender))
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        process.join()
        raise LaunchError(
            f"Expected a result from the process that plans, got its end with exit code {process.exitcode}.",
            fix="see its messages above; free memory of the host, or plan a smaller batch.",
        ) from None
    finally:
        receiver.close()
        process.join()
    if isinstance(outcome, BaseException):
        raise outcome
    return cast("T", outcome[0])


def _run(function: Callable[[], object], sender: Connection) -> None:
    torch.set_num_threads(1)  # a fork copies no threads: work for those of the parent would never end
    outcome: object
    try:
        outcome = (function(),)
        sender.send(outcome)
    except BaseException as error:
        error.add_note(f"--- in the process that plans ---\n{''.join(traceback.format_tb(error.__traceback__))}")
        try:
            pickle.loads(pickle.dumps(error))
            outcome = error
        except Exception:  # whatever the user's exception does when it is copied
            outcome = RuntimeError(f"{type(error).__name__}: {error}")
        sender.send(outcome)
    finally:
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
