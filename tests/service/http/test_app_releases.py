"""The HTTP server and frames of another release: 415 when put, a counted miss when read."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
from sidecar_rig import LIMIT_S, NAMESPACE, SLOT_BYTES, ForkedSidecar, content, disk, hashes_of

from kvstore.blocks import frame
from kvstore.blocks.frame import HEADER_BYTES
from kvstore.blocks.key import Key
from kvstore.tiers import disk as disk_tier

NAMES = hashes_of("releases", 4)


def frame_of(name: bytes, codec: str = "identity") -> bytearray:
    block = content(name)
    header, total = memoryview(bytearray(HEADER_BYTES)), frame.checksum(block)
    frame.pack_header(
        header,
        key=Key("default", NAMESPACE.digest, name),
        codec=codec,
        raw_bytes=len(block),
        stored_bytes=len(block),
        raw_sum=total,
        stored_sum=total,
    )
    return bytearray(bytes(header) + block.ljust(frame.padded_bytes(SLOT_BYTES), b"\0"))


def with_field(name: bytes, field: str) -> bytes:
    whole = frame_of(name)
    length = int.from_bytes(whole[16:18], "little")
    packed = msgpack.packb({**msgpack.unpackb(whole[18 : 18 + length]), field: 1})
    whole[16:18] = len(packed).to_bytes(2, "little")
    whole[18 : 18 + len(packed)] = packed
    whole[8:16] = frame.checksum(whole[16:HEADER_BYTES]).to_bytes(8, "little")
    return bytes(whole)


def of_version_2(name: bytes) -> bytes:
    whole = frame_of(name)
    whole[6] = 2
    return bytes(whole)


LATER: dict[str, Callable[[bytes], bytes]] = {
    "version": of_version_2,
    "codec": lambda name: bytes(frame_of(name, "later/1")),
    "field": lambda name: with_field(name, "device"),
}


def call(sidecar: ForkedSidecar, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)
    connection.request(method, path, body=body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def block_path(name: bytes) -> str:
    return f"/v1/blocks/{NAMESPACE.digest}/{name.hex()}"


@pytest.fixture
def sidecar(tmp_path: Path) -> Any:
    """A sidecar over a disk tier that a later release has used."""
    folder = tmp_path / "disk"
    tier = disk_tier.open(disk_tier.Config(directory=str(folder), capacity=64 << 20))
    view = frame.aligned_buffer(HEADER_BYTES + SLOT_BYTES)
    for name, make in zip(NAMES, (*LATER.values(), frame_of), strict=True):
        view[:] = make(name)
        key = Key("default", NAMESPACE.digest, name)
        tier.write(key, view[:HEADER_BYTES], view[HEADER_BYTES:])
    tier.close()
    made = ForkedSidecar(tmp_path, disk(folder))
    yield made
    assert made.stop() == 0


def test_a_frame_of_another_release_in_a_tier_is_a_counted_miss(sidecar: ForkedSidecar) -> None:
    for _ in range(2):
        assert [call(sidecar, "GET", block_path(name))[0] for name in NAMES] == [404] * 3 + [200]
    body = json.dumps({"namespace": NAMESPACE.digest, "hashes": [name.hex() for name in NAMES]})
    status, answer = call(sidecar, "POST", "/v1/contains", body)
    assert (status, json.loads(answer)["contains"]) == (200, [False] * 3 + [True])
    stats = sidecar.stats()["tiers"]["disk"]
    assert (stats["unsupported_frames"], stats["checksum_failures"], stats["blocks"]) == (3, 0, 4)
    metrics = call(sidecar, "GET", "/metrics")[1].decode()
    assert re.search(r'^kvstore_tier_unsupported_frames_total\{tier="disk"\} 3', metrics, re.M)
    assert re.search(r'^kvstore_tier_unsupported_segments\{tier="disk"\} 0', metrics, re.M)
    assert re.search(r'^kvstore_tier_unsupported_writes_total\{tier="disk"\} 0', metrics, re.M)


@pytest.mark.parametrize("kind", LATER)
def test_a_frame_of_another_release_is_rejected_when_put(sidecar: ForkedSidecar, kind: str) -> None:
    name = hashes_of("put", 1)[0]
    status, answer = call(sidecar, "PUT", block_path(name), LATER[kind](name))
    assert status == 415
    assert json.loads(answer)["error"].startswith("frame")
    assert call(sidecar, "GET", block_path(name))[0] == 404
    assert sidecar.stats()["l2"]["slots_filling"] == 0


def test_an_optional_field_is_ignored(sidecar: ForkedSidecar) -> None:
    name = hashes_of("put", 1)[0]
    assert call(sidecar, "PUT", block_path(name), with_field(name, "optional_device"))[0] == 204
    status, whole = call(sidecar, "GET", block_path(name))
    assert (status, whole[HEADER_BYTES:][:SLOT_BYTES]) == (200, content(name))
