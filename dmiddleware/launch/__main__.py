"""The command ``ditask``; ``python -m dmiddleware.launch`` where its script is not on the path."""

import sys
from pathlib import Path

from dmiddleware.process.ctrl_c import exit_at_ctrl_c

__all__ = ["main"]


def main() -> None:
    """Run ``ditask``, which imports modules of the current folder too, as ``python -m`` does."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with exit_at_ctrl_c():
        from dmiddleware.launch.cli import ditask
    ditask(prog_name="ditask")


if __name__ == "__main__":
    main()
