"""Builds one operator, in a process that a test may kill: `python build_one.py NAME CLASS`."""

from __future__ import annotations

import logging
import sys

from loopwright.strategies.deepspeed.builds import build

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(sys.argv[1], f"slow_operators:{sys.argv[2]}")
