"""Stand-in for xgrammar, which SGLang imports at its start even if no request has a grammar."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pydantic


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (pydantic.BaseModel,), {"__module__": __name__})


structural_tag = ModuleType(f"{__name__}.structural_tag")
structural_tag.__getattr__ = __getattr__  # type: ignore[method-assign]
sys.modules[structural_tag.__name__] = structural_tag
