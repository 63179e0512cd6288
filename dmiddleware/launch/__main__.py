"""The command ``ditask``; ``python -m dmiddleware.launch`` where its script is not on the path."""

from dmiddleware.ctrl_c import exit_at_ctrl_c

__all__ = ["main"]


def main() -> None:
    """Run ``ditask``."""
    with exit_at_ctrl_c():
        from dmiddleware.launch.cli import ditask
    ditask(prog_name="ditask")


if __name__ == "__main__":
    main()
