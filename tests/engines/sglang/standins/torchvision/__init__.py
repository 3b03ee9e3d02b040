"""Stands in for torchvision, which SGLang imports at start and its cache never uses.

The real package on CPU installs another torch. Every name in every submodule that SGLang or
transformers imports is a class without function.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class Named(type):
    """Metaclass: every public attribute of a class is the name of the attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(metaclass=Named):
    """Stands in for any requested name."""


class StandInModule(ModuleType):
    """A module that has every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates a stand-in for each submodule."""

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn
