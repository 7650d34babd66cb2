from __future__ import annotations

from loopwright.fabric import InProcessLauncher, Launcher


def test_the_function_runs_here() -> None:
    launcher: Launcher = InProcessLauncher()
    assert launcher.is_interactive_compatible
    assert launcher.launch(lambda a, b: a + b, 1, b=2) == 3
