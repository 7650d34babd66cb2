"""Runs a program's first steps under Lightning and under parity, and names the first difference.

child_program.py starts the two sides as processes, recorder.py runs in each and writes what happens there, compare.py
finds the first difference, rows.py what the documentation says about it, and program.py prints the answer.
"""

from __future__ import annotations

__all__: list[str] = []
