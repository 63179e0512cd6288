"""The face of ``ding`` itself."""

from __future__ import annotations

from typing import Final

__all__ = ["__AUTHOR__", "__TITLE__", "__VERSION__", "__version__"]

__TITLE__: Final = "DI-engine"
__VERSION__: Final = "v0.5.3"
__AUTHOR__: Final = "OpenDILab Contributors"
__version__: Final = __VERSION__
