"""What SGLang's tree and controller find after the weights or the server's arguments changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hicache_rig import PAGE_BYTES, absent, extra
from instance_rig import LENGTH, SLOTS, Instance, sequence
from sidecar_rig import ForkedSidecar

from kvstore.connectors.sglang import weight_watch

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent()), reason=absent()),
]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ForkedSidecar]:
    slab = {"l2": {"bytes": 3 * SLOTS * PAGE_BYTES, "slot_bytes": PAGE_BYTES}}
    made = ForkedSidecar(tmp_path, slab)
    yield made
    made.kill()


def test_another_weight_version_ends_sharing(
    sidecar: ForkedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The instances of this process stand for servers of their own, whose weights did not change.
    monkeypatch.setattr(weight_watch, "_process", weight_watch.ProcessWeights())
    server = Instance(extra(sidecar.socket), tmp_path)
    old, new = sequence(1), sequence(2)
    right = server.compute(old, 1)
    server.flush()
    assert server.restore(old, right) == LENGTH, "a flush alone changes no weights"

    from sglang.srt.runtime_context import get_context

    get_context().override("scheduler.weight_version", weight_version="2")
    server.flush()
    assert server.restore(old, right) == 0
    server.flush()
    stored = sidecar.stats()["l2"]["stored"]
    server.compute(new, 2)
    get_context().override("scheduler.weight_version", weight_version="default")
    server.flush()
    assert server.restore(old, right) == 0, "the name of weights is not proof of them"
    assert sidecar.stats()["l2"]["stored"] == stored
    server.stop()


@pytest.mark.parametrize("name", ["quantization_param_path", "decrypted_config_file"])
def test_other_contents_of_a_file_are_another_name(
    sidecar: ForkedSidecar, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"scale": 1.0}')
    arguments = {name: str(path)}
    tokens = sequence(1)
    writer = Instance(extra(sidecar.socket), tmp_path, **arguments)
    right = writer.compute(tokens, 1)
    writer.stop()
    path.write_text('{"scale": 2.0}')
    other = Instance(extra(sidecar.socket), tmp_path, **arguments)
    assert other.restore(tokens, right) == 0
    other.stop()
    path.write_text('{"scale": 1.0}')
    same = Instance(extra(sidecar.socket), tmp_path, **arguments)
    assert same.restore(tokens, right) == LENGTH
    same.stop()
