"""The HTTP server: frames in and out, verified; authentication; one line for every error."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    SLOTS,
    ForkedSidecar,
    content,
    disk,
    get,
    hashes_of,
    match,
    put,
    wait_until,
)

from kvstore import codecs
from kvstore.blocks import frame
from kvstore.blocks.key import Key
from kvstore.ipc.client import Client

HASHES = hashes_of("http", 8)
DIGEST = NAMESPACE.digest
TOKENS = {"token-a": "team-a", "token-b": "team-b"}
ADMIN = "token-of-the-admin"
TRANSFERS = 2


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    folder = tmp_path_factory.mktemp("open")
    made = ForkedSidecar(
        folder, {**disk(folder / "disk"), "limits": {"max_http_transfers": TRANSFERS}}
    )
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    """A sidecar that requires auth tokens."""
    made = ForkedSidecar(
        tmp_path_factory.mktemp("guarded"),
        {"server": {"auth_tokens": TOKENS, "admin_auth_token": ADMIN}},
    )
    yield made
    assert made.stop() == 0


def open_to(sidecar: ForkedSidecar) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)


def call(
    sidecar: ForkedSidecar, method: str, path: str, body: Any = None, token: str | None = None
) -> tuple[int, Any]:
    """(status, body), JSON decoded. An error is always one line of JSON."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = open_to(sidecar)
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    if answer.getheader("content-type") == "application/json":
        data = json.loads(data)
    if answer.status >= 400:
        assert set(data) == {"error"}
        assert "\n" not in data["error"]
    connection.close()
    return answer.status, data


def block_path(name: bytes, digest: str = DIGEST) -> str:
    return f"/v1/blocks/{digest}/{name.hex()}"


def frame_of(name: bytes, tenant: str = "default", codec: str = "identity", **change: Any) -> bytes:
    """A frame of the block of this hash; `change` overrides fields of its header.

    A compressed frame contains zeros, because the test contents do not compress.
    """
    block = content(name) if codec == "identity" else bytes(SLOT_BYTES)
    payload = memoryview(bytearray(2 * frame.padded_bytes(SLOT_BYTES)))
    coder = codecs.codec_by_frame_id(codec)
    stored = coder.encode(memoryview(block), payload)
    header = memoryview(bytearray(frame.HEADER_BYTES))
    fields: dict[str, Any] = {
        "key": Key(tenant, DIGEST, name),
        "codec": codec,
        "raw_bytes": len(block),
        "stored_bytes": stored,
        "raw_sum": frame.checksum(block),
        "stored_sum": frame.checksum(payload[:stored]),
    }
    frame.pack_header(header, **{**fields, **change})
    return bytes(header) + bytes(payload[: frame.padded_bytes(stored)])


def test_health_and_readiness(sidecar: ForkedSidecar) -> None:
    assert call(sidecar, "GET", "/healthz") == (200, {"status": "ok"})
    assert call(sidecar, "GET", "/readyz") == (200, {"status": "ready"})


@pytest.mark.parametrize("codec", ["identity", "zstd-planes/4"])
def test_a_frame_put_is_read_by_engines_and_by_http(sidecar: ForkedSidecar, codec: str) -> None:
    hashes = hashes_of(f"put {codec}", 3)
    for name in hashes:
        whole = frame_of(name, codec=codec)
        assert call(sidecar, "PUT", block_path(name), whole) == (204, b"")
        assert call(sidecar, "PUT", block_path(name), whole) == (204, b"")  # idempotent
    right = [content(name) if codec == "identity" else bytes(SLOT_BYTES) for name in hashes]
    with Client(sidecar.socket, NAMESPACE) as client:
        assert get(client, hashes) == (right, ["l2"] * 3)
    for name, block in zip(hashes, right, strict=True):
        status, whole = call(sidecar, "GET", block_path(name))
        header = frame.parse_header(memoryview(whole), Key("default", DIGEST, name))
        assert status == 200
        assert whole[frame.HEADER_BYTES :][: header.raw_bytes] == block


def test_http_reads_saved_blocks_from_l2_and_from_disk(sidecar: ForkedSidecar) -> None:
    with Client(sidecar.socket, NAMESPACE) as client:
        put(client, HASHES)
        assert client.sync(10.0)
    asked = {"namespace": DIGEST, "hashes": [name.hex() for name in (*HASHES, bytes(32))]}
    for tier in ("l2", "disk"):
        status, found = call(sidecar, "POST", "/v1/contains", asked)
        assert status == 200
        assert found == {"contains": [True] * 8 + [False], "tiers": [tier] * 8 + [""]}
        for name in HASHES:
            status, whole = call(sidecar, "GET", block_path(name))
            assert status == 200
            header = frame.parse_header(memoryview(whole), Key("default", DIGEST, name))
            block = memoryview(bytearray(SLOT_BYTES))
            payload = memoryview(whole)[frame.HEADER_BYTES :]
            frame.verify_stored(header, payload)
            codecs.codec_by_frame_id(header.codec).decode(payload[: header.stored_bytes], block)
            assert block == content(name)
        assert call(sidecar, "POST", "/v1/flush") == (200, {"flushed": True})
        assert call(sidecar, "POST", "/v1/clear?tier=l2") == (200, {"cleared": "l2"})
    assert call(sidecar, "POST", "/v1/clear?tier=all") == (200, {"cleared": "all"})
    assert call(sidecar, "GET", block_path(HASHES[0]))[0] == 404
    with Client(sidecar.socket, NAMESPACE) as client:
        assert match(client, HASHES) == []


def damaged(name: bytes) -> bytes:
    whole = bytearray(frame_of(name))
    whole[-1] ^= 1
    return bytes(whole)


BAD = hashes_of("bad", 1)[0]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (damaged(BAD), 400),
        (frame_of(BAD, raw_sum=1, stored_sum=1), 400),
        (frame_of(BAD)[:-4096], 400),
        (frame_of(BAD)[: frame.HEADER_BYTES], 400),
        (b"", 400),
        (b"x" * 5000, 400),
        (frame_of(BAD, codec="identity", raw_bytes=SLOT_BYTES - 1), 400),
        (frame_of(BAD, key=Key("default", "0" * 32, BAD)), 409),
        (frame_of(BAD, key=Key("default", DIGEST, bytes(32))), 409),
        (frame_of(BAD, tenant="team-a"), 409),
        (frame_of(BAD) + bytes(4 * SLOT_BYTES), 413),
    ],
    ids=[
        "corrupt",
        "wrong sums",
        "short",
        "no payload",
        "nothing",
        "no frame",
        "lengths",
        "namespace",
        "hash",
        "tenant",
        "too large",
    ],
)
def test_a_bad_frame_is_rejected_and_never_returned(
    sidecar: ForkedSidecar, body: bytes, status: int
) -> None:
    assert call(sidecar, "PUT", block_path(BAD), body)[0] == status
    assert call(sidecar, "GET", block_path(BAD))[0] == 404
    numbers = sidecar.stats()
    assert numbers["l2"]["slots_filling"] == 0
    assert numbers["http"]["transfers"] == 0


def test_a_body_of_unknown_length_is_rejected_when_too_long(sidecar: ForkedSidecar) -> None:
    connection = open_to(sidecar)
    connection.putrequest("PUT", block_path(BAD))
    connection.putheader("Transfer-Encoding", "chun" + "ked")
    connection.endheaders()
    part = bytes(4 * SLOT_BYTES)  # a little more than a buffer
    connection.send(f"{len(part):x}\r\n".encode() + part + b"\r\n0\r\n\r\n")
    answer = connection.getresponse()
    assert answer.status == 413
    assert set(json.loads(answer.read())) == {"error"}
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/blocks/xyz/00", None, 422),
        ("GET", f"/v1/blocks/{DIGEST}/0", None, 422),
        ("GET", f"/v1/blocks/{DIGEST}/zz", None, 422),
        ("GET", f"/v1/blocks/{DIGEST}/{'00' * 65}", None, 422),
        ("GET", "/v1/none", None, 404),
        ("DELETE", f"/v1/blocks/{DIGEST}/00", None, 405),
        ("POST", "/v1/contains", b"{", 400),
        ("POST", "/v1/contains", b"[" * 100_000, 400),
        ("POST", "/v1/contains", {"namespace": DIGEST}, 422),
        ("POST", "/v1/contains", {"namespace": DIGEST, "hashes": ["00"], "tenant": "team-b"}, 422),
        ("POST", "/v1/contains", {"namespace": "short", "hashes": ["00"]}, 422),
        ("POST", "/v1/contains", {"namespace": DIGEST, "hashes": ["0x"]}, 422),
        ("POST", "/v1/contains", {"namespace": DIGEST, "hashes": ["00"] * 65_537}, 422),
        ("POST", "/v1/clear", None, 422),
        ("POST", "/v1/clear?tier=l3", None, 400),
    ],
)
def test_bad_requests(
    sidecar: ForkedSidecar, method: str, path: str, body: Any, status: int
) -> None:
    assert call(sidecar, method, path, body)[0] == status


def test_the_tenant_comes_from_the_auth_token(guarded: ForkedSidecar) -> None:
    name = HASHES[0]
    mine = frame_of(name, "team-a")
    assert call(guarded, "PUT", block_path(name), mine)[0] == 401
    assert call(guarded, "PUT", block_path(name), mine, token="token-c")[0] == 401
    assert call(guarded, "PUT", block_path(name), mine, token="token-b")[0] == 409
    assert call(guarded, "PUT", block_path(name), mine, token="token-a")[0] == 204
    assert call(guarded, "GET", block_path(name), token="token-a") == (200, mine)
    assert call(guarded, "GET", block_path(name), token="token-b")[0] == 404
    asked = {"namespace": DIGEST, "hashes": [name.hex()]}
    for token, has in (("token-a", True), ("token-b", False)):
        status, found = call(guarded, "POST", "/v1/contains", asked, token=token)
        assert (status, found["contains"]) == (200, [has])
    assert call(guarded, "POST", "/v1/contains", asked)[0] == 401
    assert call(guarded, "GET", "/v1/stats")[0] == 401
    for token in ("token-a", ADMIN):
        assert call(guarded, "GET", "/v1/stats", token=token)[0] == 200
    for path in ("/v1/flush", "/v1/clear?tier=all"):
        assert call(guarded, "POST", path)[0] == 401
        assert call(guarded, "POST", path, token="token-a")[0] == 401
        assert call(guarded, "POST", path, token=ADMIN)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://elsewhere.example"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "{own}"}, 200),
        ({}, 200),
        # A page of another site cannot add this.
        ({"Origin": "https://elsewhere.example", "Authorization": "Bearer x"}, 200),
    ],
)
def test_cross_site_requests_are_rejected(
    sidecar: ForkedSidecar, headers: dict[str, str], status: int
) -> None:
    given = {name: value.replace("{own}", sidecar.url) for name, value in headers.items()}
    for path in ("/v1/clear?tier=l2", "/v1/flush"):
        connection = open_to(sidecar)
        connection.request("POST", path, headers=given)
        assert connection.getresponse().status == status
        connection.close()


def test_transfers_are_bounded(sidecar: ForkedSidecar) -> None:
    """Every buffer has an unfinished upload: the next one gets 503."""
    whole = frame_of(hashes_of("stuck", 1)[0])
    stuck = []
    for _ in range(TRANSFERS):
        connection = open_to(sidecar)
        connection.putrequest("PUT", block_path(hashes_of("stuck", 1)[0]))
        connection.putheader("Content-Length", str(len(whole)))
        connection.endheaders()
        connection.send(whole[:5000])
        stuck.append(connection)
    wait_until(lambda: sidecar.stats()["http"]["transfers"] == TRANSFERS, "all buffers taken")
    for method, body in (("GET", None), ("PUT", whole)):
        assert call(sidecar, method, block_path(BAD), body)[0] == 503
    assert call(sidecar, "GET", "/healthz")[0] == 200
    stuck[0].close()  # closed before the end
    wait_until(lambda: sidecar.stats()["http"]["transfers"] == TRANSFERS - 1, "its buffer is back")
    stuck[1].send(whole[5000:])
    assert stuck[1].getresponse().status == 204
    stuck[1].close()
    wait_until(lambda: sidecar.stats()["http"]["transfers"] == 0, "all buffers are back")


def test_a_slow_upload_is_aborted(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, {"limits": {"http_transfer_timeout": 200}})
    connection = open_to(sidecar)
    connection.putrequest("PUT", block_path(BAD))
    connection.putheader("Content-Length", "9000")
    connection.endheaders()
    assert connection.getresponse().status == 408
    connection.close()
    assert sidecar.stats()["http"]["transfers"] == 0
    assert sidecar.stop() == 0


def test_concurrent_reads_return_the_stored_bytes(sidecar: ForkedSidecar) -> None:
    """Transfers share the buffers: no reader may get the bytes of another transfer."""
    hashes = hashes_of("many", 16)
    for name in hashes:
        assert call(sidecar, "PUT", block_path(name), frame_of(name))[0] == 204
    wrong: list[str] = []

    def read(names: list[bytes]) -> None:
        for name in names:
            status, whole = call(sidecar, "GET", block_path(name))
            while status == 503:
                status, whole = call(sidecar, "GET", block_path(name))
            if status != 200 or whole != frame_of(name):
                wrong.append(name.hex())

    threads = [threading.Thread(target=read, args=(hashes[i:] + hashes[:i],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_metrics(sidecar: ForkedSidecar) -> None:
    with Client(sidecar.socket, NAMESPACE, name="metered") as client:
        put(client, hashes_of("metered", 4))
        get(client, hashes_of("metered", 4))
        assert call(sidecar, "POST", "/v1/flush")[0] == 200
        status, text = call(sidecar, "GET", "/metrics")
        numbers = sidecar.stats()
    assert status == 200
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    for state in ("free", "filling", "ready"):
        assert samples["kvstore_l2_slots", ("state", state)] == numbers["l2"][f"slots_{state}"]
    on_disk = ("tier", "disk")
    assert samples["kvstore_hit_blocks_total", ("tier", "l2")] == numbers["hit_blocks"]["l2"] > 0
    assert samples["kvstore_tier_blocks", on_disk] == numbers["tiers"]["disk"]["blocks"] > 0
    assert samples["kvstore_tier_capacity_bytes", on_disk] == 64 << 20
    assert samples["kvstore_tier_up", on_disk] == 1
    written = samples["kvstore_tier_transfer_bytes_total", ("direction", "write"), on_disk]
    assert written == numbers["tiers"]["disk"]["write_bytes"] > 0
    assert samples["kvstore_tier_checksum_failures_total", on_disk] == 0
    assert samples["kvstore_tier_write_blocks_total", ("result", "written")] > 0
    [(digest, codec)] = numbers["tiers"]["disk"]["codec"].items()
    assert digest == NAMESPACE.digest[:8]
    name, where = ("codec", codec["name"]), ("namespace", digest)
    assert samples["kvstore_codec_ratio", name, where, on_disk] == codec["ratio"] >= 1
    rate = "kvstore_codec_bytes_per_second"
    encoded = samples[rate, name, ("direction", "encode"), where, on_disk]
    assert encoded == codec["encode_rate"] > 0
    assert samples["kvstore_codec_changes_total", name, where, on_disk] == codec["changed"]
    assert samples["kvstore_sessions",] == 1
    for op in (("op", "match"), ("op", "load"), ("op", "save"), ("op", "commit")):
        count = samples["kvstore_request_seconds_count", op]
        assert samples["kvstore_request_seconds_bucket", ("le", "+Inf"), op] == count
    assert samples["kvstore_request_seconds_count", ("op", "load")] > 0
    assert samples["kvstore_l2_slot_bytes",] == SLOT_BYTES
    assert sum(samples["kvstore_l2_slots", ("state", s)] for s in ("free", "ready")) == SLOTS
