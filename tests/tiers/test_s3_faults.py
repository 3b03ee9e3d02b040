"""The S3 tier with failures of the service, the network or the credentials."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

from s3_rig import FaultProxy, S3Server

from kvstore.blocks.key import Key
from kvstore.errors import FrameInvalid, TierError, TierFull, TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.tiers.s3.tier import S3Tier

BLOCK_BYTES = 100_000
CLOSE_LIMIT_S = 20.0
"""Time limit of closing a tier, while a request hangs for a minute."""


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as running:
        yield running


@pytest.fixture
def buffer() -> FrameBuffer:
    return FrameBuffer(9 << 20)


class Rig:
    """A tier with one block, behind a proxy."""

    def __init__(self, server: S3Server, proxy: FaultProxy, buffer: FrameBuffer) -> None:
        self.server = server
        self.proxy = proxy
        self.buffer = buffer
        self.bucket = server.new_bucket()
        self.tier = self.open()
        self.key = key_of(1)
        self.write(self.key)

    def open(self, **changed: Any) -> S3Tier:
        return self.server.open(
            self.bucket, **{"endpoint": self.proxy.endpoint, "timeout": "5s", **changed}
        )

    def write(self, key: Key, nbytes: int = BLOCK_BYTES, version: int = 0) -> None:
        self.tier.write(*self.buffer.fill(key, nbytes, version))

    def read(self, key: Key) -> int:
        return self.read_with(self.tier, key)

    def read_with(self, tier: S3Tier, key: Key) -> int:
        return tier.read(key, self.buffer.header, self.buffer.payload)

    def reads_well(self, key: Key) -> bool:
        return self.buffer.version_of(key, self.read(key)) == 0

    def count(self, kind: str) -> int:
        return int(self.tier.stats()[f"errors_{kind}"])


@pytest.fixture
def rig(s3_server: S3Server, proxy: FaultProxy, buffer: FrameBuffer) -> Iterator[Rig]:
    made = Rig(s3_server, proxy, buffer)
    yield made
    proxy.strike("")
    made.tier.close()


# -------------------------------------------------------------------- the matrix

ERRORS: dict[str, tuple[str, str, str, type[TierError]]] = {
    "slow down": ("503 Slow Down", "SlowDown", "slow_down", TierUnavailable),
    "after a restart": ("500 Internal Server Error", "InternalError", "server", TierUnavailable),
    "expired": ("400 Bad Request", "ExpiredToken", "credentials", TierUnavailable),
    "forbidden": ("403 Forbidden", "AccessDenied", "credentials", TierUnavailable),
    "no bucket": ("404 Not Found", "NoSuchBucket", "bucket", TierUnavailable),
    "full": ("507 Insufficient Storage", "InsufficientStorage", "full", TierFull),
    "not like that": ("400 Bad Request", "InvalidArgument", "request", TierError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_service(rig: Rig, name: str) -> None:
    """Each operation raises the expected error and counts it. Afterwards the tier works again."""
    status, code, kind, error = ERRORS[name]
    rig.proxy.answer(status, code)
    operations: list[Callable[[], object]] = [
        lambda: rig.read(rig.key),
        lambda: rig.write(key_of(2)),
        lambda: rig.tier.reconcile(),
        lambda: rig.tier.clear(),
    ]
    for number, operation in enumerate(operations[:3], start=1):
        with pytest.raises(error) as caught:
            operation()
        assert isinstance(caught.value, TierUnavailable) == (error is TierUnavailable)
        assert rig.count(kind) == number
    assert code in str(rig.tier.stats()["last_error"])
    assert rig.tier.contains([rig.key, key_of(2)]) == [True, False]
    rig.proxy.strike("")
    assert rig.reads_well(rig.key)
    assert rig.tier.stats()["last_error"] == ""
    rig.write(key_of(2))
    assert rig.reads_well(key_of(2))


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [("reset", ("reset",)), ("cut", ("truncated",)), ("lose", ("reset", "truncated"))],
)
def test_broken_connections(rig: Rig, mode: str, kinds: tuple[str, ...]) -> None:
    rig.proxy.strike(mode, b"GET ")
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            rig.read(rig.key)
    assert sum(map(rig.count, kinds)) == 3
    assert rig.tier.contains([rig.key]) == [True]
    rig.proxy.strike("")
    assert rig.reads_well(rig.key)


def test_a_write_over_a_slow_link_takes_the_time_of_its_bytes(rig: Rig) -> None:
    """More than four times the timeout, which limits a request without a body."""
    tier = rig.open(timeout="700ms")
    rig.proxy.bytes_per_s = 2.2e6
    tier.write(*rig.buffer.fill(key_of(2), 8 << 20))
    rig.proxy.bytes_per_s = 0
    assert rig.buffer.version_of(key_of(2), rig.read_with(tier, key_of(2))) == 0
    assert int(tier.stats()["errors"]) == 0
    tier.close()


@pytest.mark.parametrize("mode", ["hang", "drip"])
def test_a_hung_or_dripping_service_is_not_waited_for(rig: Rig, mode: str) -> None:
    """The slow transfer always makes progress. Only the limit of the whole request ends it."""
    tier = rig.open(timeout="100ms")
    rig.proxy.strike(mode)
    for operation in (
        lambda: tier.read(rig.key, rig.buffer.header, rig.buffer.payload),
        lambda: tier.write(*rig.buffer.fill(key_of(3), BLOCK_BYTES)),
    )[: 2 if mode == "hang" else 1]:
        with pytest.raises(TierUnavailable, match="timeout"):
            operation()
    assert int(tier.stats()["errors_timeout"]) >= 1
    rig.proxy.strike("")
    tier.close()
    assert rig.reads_well(rig.key)


def test_closing_waits_for_no_request_that_hangs(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A write and a round of the reconciler hang for minutes."""
    tier = rig.open(timeout="300s", list_interval="50ms")
    rig.proxy.strike("hang")
    frame = FrameBuffer(BLOCK_BYTES).fill(key_of(2), BLOCK_BYTES)

    def try_to_write() -> None:
        with contextlib.suppress(TierUnavailable):
            tier.write(*frame)

    calls = (try_to_write, tier.close)
    write, close = (threading.Thread(target=call, daemon=True) for call in calls)
    write.start()
    wait_until(lambda: any(b"PUT " in head for head in rig.proxy.heads[-9:]))
    close.start()
    close.join(CLOSE_LIMIT_S)
    assert not close.is_alive()
    assert write.is_alive()
    rig.proxy.strike("")
    rig.proxy.hang_up()
    write.join(60)
    assert sum("requests hang" in record.message for record in caplog.records) == 1


def test_a_slow_service_is_only_slow(rig: Rig) -> None:
    rig.write(key_of(4), 3000)
    rig.proxy.strike("drip")
    assert rig.reads_well(key_of(4))


def test_a_corrupted_reply_is_seen_above_and_harms_nothing(rig: Rig) -> None:
    rig.proxy.strike("flip", b"GET ")
    length = rig.read(rig.key)
    with pytest.raises(FrameInvalid):
        rig.buffer.version_of(rig.key, length)
    rig.proxy.strike("")
    assert rig.reads_well(rig.key)


def test_nobody_listens(rig: Rig) -> None:
    rig.proxy.close()
    with pytest.raises(TierUnavailable):
        rig.read(rig.key)
    with pytest.raises(TierUnavailable):
        rig.write(key_of(2))
    assert rig.count("connect") + rig.count("reset") >= 2


def test_a_large_body_that_is_refused_early(rig: Rig) -> None:
    """The service replies and closes before it has read the body."""
    rig.proxy.answer("503 Slow Down", "SlowDown", having=b"PUT ", mode="early")
    with pytest.raises(TierUnavailable):
        rig.write(key_of(5), 8 << 20)
    assert rig.count("slow_down") + rig.count("reset") == 1
    rig.proxy.strike("")
    rig.write(key_of(5), 8 << 20)
    assert rig.reads_well(key_of(5))


def test_a_put_whose_reply_was_lost_is_made_once(rig: Rig) -> None:
    rig.proxy.strike("lose", b"PUT ")
    with pytest.raises(TierUnavailable):
        rig.write(key_of(6))
    assert rig.tier.contains([key_of(6)]) == [False]
    rig.proxy.strike("")
    before = rig.server.names(rig.bucket)
    rig.write(key_of(6))
    assert rig.reads_well(key_of(6))
    assert rig.server.names(rig.bucket) == before
    assert len(before) == 2


def test_an_idle_connection_that_was_closed_is_no_fault(rig: Rig) -> None:
    """The service closes idle connections."""
    rig.proxy.hang_up()
    assert rig.reads_well(rig.key)
    assert rig.tier.stats()["errors"] == 0


def test_a_service_without_conditional_put(rig: Rig) -> None:
    rig.proxy.heads.clear()
    rig.proxy.answer("501 Not Implemented", "NotImplemented", having=b"If-None-Match")
    for key in (key_of(7), key_of(8)):
        rig.write(key)
        assert rig.reads_well(key)
    puts = [b"If-None-Match" in head for head in rig.proxy.heads if head.startswith(b"PUT ")]
    assert puts == [True, False, False], "a conditional put is tried once"


# -------------------------------------------------------------------- missing and invalid objects


def test_a_bucket_that_was_emptied_is_misses_and_is_filled_again(rig: Rig) -> None:
    keys = [key_of(number) for number in range(10, 14)]
    for key in keys:
        rig.write(key)
    for name in rig.server.names(rig.bucket):
        rig.server.client.delete_object(Bucket=rig.bucket, Key=name)
    assert [rig.read(key) for key in keys[:2]] == [0, 0]
    assert rig.tier.contains(keys) == [False, False, True, True]
    rig.tier.reconcile()
    assert rig.tier.contains(keys) == [False] * 4
    assert rig.tier.stats()["bytes_used"] == 0
    assert int(rig.tier.stats()["vanished"]) == 5
    for key in keys:
        rig.write(key)
        assert rig.reads_well(key)


def test_an_object_of_other_bytes_under_our_name_is_a_miss(rig: Rig) -> None:
    """The object is shorter or longer than the original."""
    rig.write(key_of(2))
    for name in rig.server.names(rig.bucket):
        rig.server.client.put_object(Bucket=rig.bucket, Key=name, Body=b"x" * 5000)
    assert rig.read(rig.key) == 0
    for name in rig.server.names(rig.bucket):
        rig.server.client.put_object(Bucket=rig.bucket, Key=name, Body=b"x" * 500_000)
    assert rig.read(key_of(2)) == 0
    assert rig.count("invalid") == 2
    assert rig.tier.contains([rig.key, key_of(2)]) == [False, False]


@pytest.mark.parametrize("damage", ["footer", "index", "short", "empty", "other"])
def test_a_damaged_segment_is_ignored_and_counted(rig: Rig, damage: str) -> None:
    rig.write(key_of(2))
    name = next(iter(rig.server.names(rig.bucket)))
    body = bytearray(rig.server.objects(rig.bucket)[name])
    if damage == "footer":
        body[-30] ^= 1
    if damage == "index":
        body[-100] ^= 1
    spoilt = {"short": body[:-1], "empty": b"", "other": b"hello" * 1000}.get(damage, body)
    rig.server.client.put_object(Bucket=rig.bucket, Key=name, Body=bytes(spoilt))
    fresh = rig.open()
    assert sum(fresh.contains([rig.key, key_of(2)])) == 1
    assert fresh.stats()["corrupt_segments"] == 1
    requests = int(fresh.stats()["requests"])
    fresh.reconcile()
    assert fresh.stats()["corrupt_segments"] == 1
    assert int(fresh.stats()["requests"]) <= requests + 3, "an invalid segment is read once"
    fresh.close()
    # A new write of the block uses another name.
    again = rig.open()
    missing = next(key for key in (rig.key, key_of(2)) if not again.contains([key])[0])
    again.write(*rig.buffer.fill(missing, BLOCK_BYTES))
    length = again.read(missing, rig.buffer.header, rig.buffer.payload)
    assert rig.buffer.version_of(missing, length) == 0
    again.close()


# -------------------------------------------------------------------- opening


def test_opening_needs_no_service_and_finds_it_later(
    s3_server: S3Server, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.proxy.strike("reset")
    with caplog.at_level(logging.WARNING):
        tier = rig.open(list_interval="50ms")
    assert tier.contains([rig.key]) == [False]
    assert tier.read(rig.key, rig.buffer.header, rig.buffer.payload) == 0
    assert tier.stats()["last_error"]
    lines = [record for record in caplog.records if record.name.startswith("kvstore.tiers.s3")]
    assert len(lines) == 1, "one line, not one per round"
    assert "\n" not in lines[0].getMessage()
    rig.proxy.strike("")
    wait_until(lambda: tier.contains([rig.key]) == [True])
    tier.close()


@pytest.mark.parametrize(
    ("changed", "kind", "word"),
    [
        ({"secret_key": "not-the-one"}, "credentials", "rejects the credentials"),
        ({"access_key": "nobody", "secret_key": "x"}, "credentials", "rejects the credentials"),
        ({"bucket": "there-is-no-such-bucket"}, "bucket", "bucket"),
    ],
)
def test_wrong_credentials_and_wrong_bucket_are_one_line_and_misses(
    s3_server: S3Server,
    buffer: FrameBuffer,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    kind: str,
    word: str,
) -> None:
    bucket = s3_server.new_bucket()
    with caplog.at_level(logging.WARNING):
        tier = s3_server.open(**{"bucket": bucket, **changed})
    assert tier.contains([key_of(1)]) == [False]
    assert word in str(tier.stats()["last_error"])
    assert int(tier.stats()[f"errors_{kind}"]) == 1
    text = caplog.text + str(tier.stats())
    assert "not-the-one" not in text
    if kind == "credentials":
        with pytest.raises(TierUnavailable):
            tier.write(*buffer.fill(key_of(1), 5000))
    tier.close()


def test_no_credentials_at_all(
    s3_server: S3Server, buffer: FrameBuffer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tier = s3_server.open(s3_server.new_bucket(), access_key="", secret_key="")
    assert "no credentials" in str(tier.stats()["last_error"])
    with pytest.raises(TierUnavailable):
        tier.write(*buffer.fill(key_of(1), 5000))
    tier.close()


def test_credentials_come_from_the_usual_chain(
    s3_server: S3Server, buffer: FrameBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = s3_server.config("any-bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", config.access_key.get_secret_value())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", config.secret_key.get_secret_value())
    tier = s3_server.open(s3_server.new_bucket(), access_key="", secret_key="")
    tier.write(*buffer.fill(key_of(1), 5000))
    assert buffer.version_of(key_of(1), tier.read(key_of(1), buffer.header, buffer.payload)) == 0
    tier.close()


def test_encryption_is_asked_for_at_every_put(rig: Rig) -> None:
    tier = rig.open(encryption="aws:kms", kms_key="the-key")
    rig.proxy.heads.clear()
    # SeaweedFS has no such key and may reject the request. The test checks the request's headers.
    with contextlib.suppress(TierError):
        tier.write(*rig.buffer.fill(key_of(9), 5000))
    tier.close()
    puts = [head.lower() for head in rig.proxy.heads if head.startswith(b"PUT ")]
    assert puts
    for head in puts:
        assert b"x-amz-server-side-encryption: aws:kms" in head
        assert b"x-amz-server-side-encryption-aws-kms-key-id: the-key" in head


def test_a_service_that_is_killed_and_comes_back(buffer: FrameBuffer) -> None:
    with tempfile.TemporaryDirectory() as place:
        server = S3Server(Path(place))
        server.start()
        try:
            tier = server.open(server.new_bucket(), list_interval="200ms", timeout="5s")
            keys = [key_of(number) for number in range(3)]
            for key in keys:
                tier.write(*buffer.fill(key, BLOCK_BYTES))
            server.kill()
            with pytest.raises(TierUnavailable):
                tier.read(keys[0], buffer.header, buffer.payload)
            with pytest.raises(TierUnavailable):
                tier.write(*buffer.fill(key_of(9), BLOCK_BYTES))
            server.start()
            wait_until(lambda: readable(tier, keys, buffer), limit_s=120)
            tier.write(*buffer.fill(key_of(9), BLOCK_BYTES))
            assert readable(tier, [*keys, key_of(9)], buffer)
            tier.close()
        finally:
            server.stop()


def readable(tier: S3Tier, keys: list[Key], buffer: FrameBuffer) -> bool:
    """Whether all blocks read back. A rejected request counts as no."""
    try:
        lengths = []
        for key in keys:
            lengths.append(tier.read(key, buffer.header, buffer.payload))
            if lengths[-1]:
                assert buffer.version_of(key, lengths[-1]) == 0
        return all(lengths)
    except TierUnavailable:
        return False


def wait_until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s, "the expected state was not reached"
        time.sleep(0.05)
