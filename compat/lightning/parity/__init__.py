"""Parity with Lightning: each difference that changes a program's numbers, counts or hook calls can be switched off.

`install(parity=True)` or `loopwright run-lightning --parity` gives a program the numbers of Lightning, to the last bit
on the CPU. switches.py has the table; the other files have what a switch puts in place of Loopwright's own, when a run
begins. Nothing here runs without a switch.
"""

from __future__ import annotations

__all__: list[str] = []
