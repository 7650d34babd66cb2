"""Runs a program's first steps under Lightning and under parity, and names the first difference.

recorder.py runs inside each side and writes what happens there, sides.py starts the sides, compare.py finds the first
difference, rows.py what the documents say of it, and program.py puts the answer into words.
"""

from __future__ import annotations

__all__: list[str] = []
