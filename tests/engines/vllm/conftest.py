"""Two processes with vLLM imported, for all tests of a run: starting one takes longer than most
tests. A new engine in a process ends the previous one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_rig import Engine


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    made = (Engine(folder / "a.log"), Engine(folder / "b.log"))
    yield made
    assert [engine.end() for engine in made] == [0, 0]
