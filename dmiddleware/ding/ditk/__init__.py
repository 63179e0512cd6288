"""The face of ``ditk``: its logging."""

from dmiddleware.ding.ditk import logging

__all__ = ["logging"]
