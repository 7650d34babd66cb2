"""`python -m loopwright` and the `loopwright` command."""

from __future__ import annotations

import os
import sys

from .cli import run


def main() -> int:
    """Run the command line; return its exit code: 141 where the reader of the output has gone, as after `| head`."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
