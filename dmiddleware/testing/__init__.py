"""What tests of chains need, this project's own and its users': a fake clock and a tape."""

from dmiddleware.testing.clock import FakeClock
from dmiddleware.testing.tape import Tape

__all__ = ["FakeClock", "Tape"]
