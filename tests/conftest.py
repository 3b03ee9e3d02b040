"""Here so that pytest puts this folder on the path: tests in subfolders share its helpers."""

from __future__ import annotations

from hypothesis import settings

# No test depends on how fast the machine is.
settings.register_profile("kvstore", deadline=None)
settings.load_profile("kvstore")
