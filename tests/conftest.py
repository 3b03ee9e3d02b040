"""Here so that pytest puts this folder on the path: tests in subfolders share its helpers."""

from __future__ import annotations

import importlib.util

# The environments of real engines have no hypothesis, and no property tests either.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No test depends on how fast the machine is.
    settings.register_profile("kvstore", deadline=None)
    settings.load_profile("kvstore")
