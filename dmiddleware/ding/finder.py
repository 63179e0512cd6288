"""Makes ``ding``, ``ditk`` and the old ``gym`` importable, in this process and for its program.

A module ``ding.a.b.c`` is a view of the nearest face: ``dmiddleware.ding.a.b.c`` if there is such a
file, else ``dmiddleware.ding.a.b``, and so on. A face has the names that are here, and may have a
table ``REFUSED`` of names that are not, each with what to use instead. What a checkout of DI-engine
or a fork of it has beside DI-engine's own modules (``ding.example``, tests, a module of the user's)
is read from its files. ``dizoo`` always comes from files. What the face of ``gym`` does not have is
Gymnasium's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dmiddleware.ding.module_names import MODULE_NAMES
from dmiddleware.ding.old_numbers import TolerantFloat
from dmiddleware.ding.old_pettingzoo import use_old_rules
from dmiddleware.errors import DMiddlewareError
from dmiddleware.process.first_imports import add_first_import, remove_first_import
from dmiddleware.registry import nearest

__all__ = ["NotHere", "close_door", "open_door"]

_FACES: Final[Mapping[str, str]] = {
    "ding": "dmiddleware.ding",
    "ditk": "dmiddleware.ding.ditk",
    "gym": "dmiddleware.ding.gym",
}
"""The packages that this door serves, and where their faces are."""

_MOVED: Final = "pettingzoo.mpe"
_MOVED_TO: Final = "mpe2"
"""PettingZoo's particle envs, which are a package of their own today."""

_ABOUT: Final = "dmiddleware.ding.about"
"""The face of ``ding`` itself."""


class NotHere(DMiddlewareError, ImportError):
    """A name of DI-engine that this project does not have."""


class _ViewModule(ModuleType):
    """A module whose names hide its modules of the same name, such as ``ding.rl_utils.gae``."""

    def __setattr__(self, key: str, value: Any) -> None:
        # So the import system puts a module that it has loaded into its parent.
        if isinstance(value, ModuleType) and self._has(key):
            return
        super().__setattr__(key, value)

    def _has(self, key: str) -> bool:
        try:
            return not isinstance(getattr(self, key), ModuleType)
        except AttributeError:
            return False

    def __reduce__(self) -> tuple[Any, ...]:
        """Let functions that name the module be sent to other processes."""
        return importlib.import_module, (self.__name__,)


class _View(importlib.abc.Loader):
    """Loads a module that looks each name up in a face."""

    def __init__(self, face: str) -> None:
        self._face = face

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return _ViewModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        face, name = importlib.import_module(self._face), module.__name__

        def look_up(key: str) -> Any:
            try:
                return getattr(face, key)
            except AttributeError:
                raise AttributeError(_refusal(face, name, key)) from None

        module.__doc__ = face.__doc__
        module.__dict__["__getattr__"] = look_up
        module.__dict__["__all__"] = _public_names(face)


def _public_names(face: ModuleType) -> list[str]:
    names = getattr(face, "__all__", None)
    return list(names) if names is not None else [n for n in vars(face) if not n.startswith("_")]


def _refusal(face: ModuleType, module: str, key: str) -> str:
    """Return why a module has no such name, and what to do."""
    refused: Mapping[str, str] = getattr(face, "REFUSED", {})
    if key in refused:
        return f"{module}.{key} of DI-engine is not here: {refused[key]}"
    close = nearest(key, _public_names(face))
    hint = f"; here are {', '.join(close)}" if close else ""
    return f"{module}.{key} of DI-engine is not here{hint} (docs/di-engine.md lists what is)"


class _OldRules(importlib.abc.Loader):
    """Runs a module's file by the rules of its time.

    Its ``float`` takes an array of one element, as with NumPy 1, and the parallel envs that it
    makes reset as PettingZoo's did.
    """

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["float"] = TolerantFloat
        self._loader.exec_module(module)
        use_old_rules(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root == "dizoo":
            return _with_old_rules(importlib.machinery.PathFinder.find_spec(fullname, path))
        if fullname.startswith(_MOVED):
            moved = fullname.replace(_MOVED, _MOVED_TO, 1)
            return _view(fullname, moved) if _exists(moved) else None
        if root not in _FACES:
            return None
        if fullname in MODULE_NAMES or (root != "ding" and not rest):
            return _view(fullname, _nearest_face(root, rest))
        if root == "ding":
            spec = _on_disk(fullname)
            if spec is not None:
                return _with_old_rules(spec)
        else:
            for package in (_FACES[root], "gymnasium") if root == "gym" else (_FACES[root],):
                if _exists(f"{package}.{rest}"):
                    return _view(fullname, f"{package}.{rest}")
        parent, _, key = fullname.rpartition(".")
        face = importlib.import_module(_nearest_face(root, parent.partition(".")[2]))
        raise NotHere(_refusal(face, parent, key), name=fullname)


def _view(fullname: str, face: str) -> importlib.machinery.ModuleSpec:
    return importlib.machinery.ModuleSpec(fullname, _View(face), is_package=True)


def _nearest_face(root: str, rest: str) -> str:
    """Return the module that serves a name below a root; the root's own face serves the rest."""
    words = rest.split(".") if rest else []
    while words:
        name = f"{_FACES[root]}.{'.'.join(words)}"
        if _exists(name):
            return name
        words.pop()
    return _ABOUT if root == "ding" else _FACES[root]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # A parent of it is a module, not a package.


def _on_disk(fullname: str) -> importlib.machinery.ModuleSpec | None:
    folders = fullname.split(".")[:-1]
    places = [str(Path(entry or ".").joinpath(*folders)) for entry in sys.path]
    return importlib.machinery.PathFinder.find_spec(fullname, places)


def _with_old_rules(
    spec: importlib.machinery.ModuleSpec | None,
) -> importlib.machinery.ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        spec.loader = _OldRules(spec.loader)
    return spec


_FINDER: Final = _Finder()


def open_door(folder: str | Path | None = None) -> None:
    """Serve ``ding``, ``ditk`` and ``gym`` in this process from now on; twice is once.

    Args:
        folder: where the program is. If that is in a checkout of DI-engine, ``dizoo`` and the rest
            of the checkout can be imported, too, after all that is on the import path already.
    """
    path = None if folder is None else Path(folder).resolve()
    for place in () if path is None else (path, *path.parents):
        if (place / "dizoo").is_dir():
            sys.path += [] if str(place) in sys.path else [str(place)]
            break
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        add_first_import(__package__)


def close_door() -> None:
    """Serve them no longer, and forget the modules that were served."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        remove_first_import(__package__)
    for name in [name for name in sys.modules if name.partition(".")[0] in (*_FACES, "dizoo")]:
        del sys.modules[name]
