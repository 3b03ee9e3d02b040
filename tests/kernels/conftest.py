"""Fixtures of several kernel tests."""

from __future__ import annotations

import cuda_shim
import pytest


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> cuda_shim.Shim:
    return cuda_shim.build(tmp_path_factory.mktemp("shim"))
