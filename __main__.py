"""`python -m loopwright` and the `loopwright` command."""

from __future__ import annotations

import sys

from .cli import run


def main() -> int:
    """Run the command line; return its exit code."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
