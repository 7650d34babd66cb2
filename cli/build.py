"""Makes objects of plans. Called by app.py, when everything has been checked."""

from __future__ import annotations

import functools
from typing import Any

from .typed import Plan

__all__ = ["build"]

# Any in this file: whatever is made.


def build(value: Any) -> Any:
    """Return a value in which every plan has been carried out, innermost first.

    An error of a constructor gets a note that says where in the settings its arguments stand.
    """
    if isinstance(value, Plan):
        arguments = {name: build(one) for name, one in value.arguments.items()}
        if value.is_partial:
            return functools.partial(value.target, **arguments)
        try:
            return value.target(**arguments)
        except Exception as error:
            where = value.path.replace(".init_args", "") or "the configuration"
            error.add_note(f"while {where} was made ({value.target.__qualname__})")
            raise
    if isinstance(value, dict):
        return {key: build(one) for key, one in value.items()}
    if isinstance(value, list):
        return [build(one) for one in value]
    return value
