"""Parts of the S3 tier that need no service: bytes and names, the index, groups and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("boto3")

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.blocks.key import Key
from kvstore.config.settings import validate
from kvstore.errors import ConfigError, TierError, TierFull, TierUnavailable
from kvstore.testing.frames import FrameBuffer, key_of
from kvstore.testing.processes import PACKAGE_PARENT
from kvstore.tiers import s3
from kvstore.tiers.disk.index import Entries
from kvstore.tiers.s3 import faults, layout
from kvstore.tiers.s3.objects import Objects
from kvstore.tiers.s3.packer import Group, Packer
from kvstore.tiers.s3.segment_index import Segment, SegmentIndex

IDENTITY = bytes(range(16))
SECTOR_BYTES = 4096


def entries_of(keys: list[Key], pages: int = 3) -> Entries:
    entries = Entries()
    for number, key in enumerate(keys):
        entries.add(key, number * pages, pages)
    return entries


def footer_of(keys: list[Key]) -> tuple[bytes, int]:
    entries = entries_of(keys)
    frames_bytes = len(keys) * 3 * SECTOR_BYTES
    footer = layout.pack_footer(entries, IDENTITY, frames_bytes)
    return footer, frames_bytes + len(footer)


# -------------------------------------------------------------------- bytes and names


def test_a_footer_reads_back() -> None:
    keys = [key_of(number, tenant=f"t{number % 3}") for number in range(40)]
    footer, nbytes = footer_of(keys)
    assert layout.footer_bytes(footer[-layout.TRAILER_BYTES :], nbytes) == len(footer)
    parsed = layout.parse_footer(footer, nbytes)
    assert list(parsed.entries) == [(key, 3 * n, 3) for n, key in enumerate(keys)]
    assert parsed.identity == IDENTITY
    assert len(footer) <= layout.max_footer_bytes(keys)


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=150)
def test_a_flipped_byte_of_a_footer_is_seen(at: int, by: int) -> None:
    footer, nbytes = footer_of([key_of(number) for number in range(5)])
    corrupt = bytearray(footer)
    corrupt[at % len(corrupt)] ^= by
    with pytest.raises(faults.Invalid):
        layout.parse_footer(bytes(corrupt), nbytes)


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_a_footer_or_tombstone(data: bytes) -> None:
    with pytest.raises(faults.Invalid):
        layout.parse_footer(data, len(data))
    with pytest.raises(faults.Invalid):
        layout.parse_tombstone(data)


@pytest.mark.parametrize(
    ("entries", "frames_pages"),
    [
        ([(0, 3), (2, 2)], 4),  # ends exactly at the end of the frames
        ([(0, 1)], 3),
        ([(0, 4)], 3),
        ([(0, 2), (0, 2)], 4),
        ([], 3),
    ],
)
def test_an_index_that_cannot_be_is_refused(
    entries: list[tuple[int, int]], frames_pages: int
) -> None:
    index = Entries()
    for number, (page, pages) in enumerate(entries):
        index.add(key_of(number), page, pages)
    frames_bytes = frames_pages * SECTOR_BYTES
    footer = layout.pack_footer(index, IDENTITY, frames_bytes)
    if entries == [(0, 3), (2, 2)]:
        layout.parse_footer(footer, frames_bytes + len(footer))
        footer = layout.pack_footer(index, IDENTITY, frames_bytes - SECTOR_BYTES)
    with pytest.raises(faults.Invalid):
        layout.parse_footer(footer, frames_bytes + len(footer))


def test_a_trailer_must_fit_the_object() -> None:
    footer, nbytes = footer_of([key_of(1)])
    with pytest.raises(faults.Invalid):
        layout.footer_bytes(footer, nbytes + SECTOR_BYTES)


def test_names_follow_from_the_keys_alone() -> None:
    keys = [key_of(number) for number in range(6)]
    name = layout.segment_name("p/", 16, keys, 0)
    assert name == layout.segment_name("p/", 16, keys[::-1], 0)
    others = {
        layout.segment_name("p/", 16, keys, 1),
        layout.segment_name("p/", 16, keys[:5], 0),
        layout.segment_name("p/", 16, [keys[0]._replace(tenant="x"), *keys[1:]], 0),
    }
    assert len(others | {name}) == 4
    folders = {
        layout.segment_name("", 4, [key_of(number)], 0).partition("/")[0] for number in range(200)
    }
    assert folders == {"00", "01", "02", "03"}


def test_parts_of_a_key_do_not_run_together() -> None:
    one = layout.segment_name("", 1, [Key("ab", "c", b"d")], 0)
    assert one != layout.segment_name("", 1, [Key("a", "bc", b"d")], 0)


def test_only_our_names_are_ours() -> None:
    name = layout.segment_name("p/", 16, [key_of(1)], 0)
    tombstone = layout.tombstone_name(name, b"x")
    assert layout.is_tier_object(name, "p/")
    assert layout.is_tier_object(tombstone, "p/")
    assert layout.segment_of(tombstone) == name
    for other in (name + "x", "q" + name, "p/" + name, "p/backup.seg", name.upper(), name[:-1]):
        assert not layout.is_tier_object(other, "p/")


def test_a_tombstone_reads_back_and_corruption_is_seen() -> None:
    tombstone = layout.pack_tombstone(IDENTITY, {7, 3, 4000})
    assert layout.parse_tombstone(tombstone) == (IDENTITY, {3, 7, 4000})
    for at in range(len(tombstone)):
        corrupt = bytearray(tombstone)
        corrupt[at] ^= 1
        with pytest.raises(faults.Invalid):
            layout.parse_tombstone(bytes(corrupt))
    with pytest.raises(faults.Invalid):
        layout.parse_tombstone(tombstone[:-4])


# -------------------------------------------------------------------- the index


class SegmentIndexMachine(RuleBasedStateMachine):
    """The index against a model: the live keys of each segment."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SegmentIndex()
        self.truth: dict[str, dict[Key, int]] = {}

    @rule(numbers=st.sets(st.integers(0, 12), min_size=1, max_size=5), dead=st.integers(0, 31))
    def add(self, numbers: set[int], dead: int) -> None:
        keys = [key_of(number) for number in sorted(numbers)]
        name = layout.segment_name("", 1, keys, 0)
        if name in self.truth:
            return
        footer, nbytes = footer_of(keys)
        parsed = layout.parse_footer(footer, nbytes)
        segment = Segment(name, parsed, etag="", modified_s=0.0, own=True)
        segment.deleted_sectors = {3 * n for n in range(len(keys)) if dead >> n & 1}
        self.index.add_segment(segment)
        self.truth[name] = {
            key: 3 * n for n, key in enumerate(keys) if 3 * n not in segment.deleted_sectors
        }

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if not self.truth:
            return
        name = data.draw(st.sampled_from(sorted(self.truth)))
        alone = self.truth.pop(name)
        for others in self.truth.values():
            alone = {key: page for key, page in alone.items() if key not in others}
        assert self.index.remove_segment(self.index.segments[name]) == len(alone)

    @rule(number=st.integers(0, 12))
    def kill(self, number: int) -> None:
        key = key_of(number)
        holders = {name for name, keys in self.truth.items() if keys.pop(key, None) is not None}
        assert {segment.name for segment in self.index.mark_deleted(key)} == holders

    @rule(data=st.data(), dead=st.integers(1, 31))
    def bury(self, data: st.DataObject, dead: int) -> None:
        if not self.truth:
            return
        name = data.draw(st.sampled_from(sorted(self.truth)))
        pages = {3 * n for n in range(5) if dead >> n & 1}
        self.index.apply_tombstone(self.index.segments[name], pages)
        keys = self.truth[name]
        self.truth[name] = {key: page for key, page in keys.items() if page not in pages}

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.truth:
            name = data.draw(st.sampled_from(sorted(self.truth)))
            self.index.touch(self.index.segments[name])
            assert list(self.index.lru_order())[-1].name == name

    @invariant()
    def every_key_is_found_in_the_first_segment_that_holds_it(self) -> None:
        self.index.check_invariants()
        listed = dict(row for each in self.index.mru_order() for row in self.index.blocks_of(each))
        for number in range(13):
            key = key_of(number)
            holders = [name for name, keys in self.truth.items() if key in keys]
            found = self.index.find(key)
            if not holders:
                assert found is None
                assert key not in listed
                continue
            assert found is not None
            assert (found[0].name, found[1]) == (min(holders), self.truth[min(holders)][key])
            assert listed[key] == 3 * SECTOR_BYTES


TestSegmentIndex = SegmentIndexMachine.TestCase
TestSegmentIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# -------------------------------------------------------------------- groups


class Uploads:
    """Replaces the upload: records groups, and ends them when the test says so."""

    def __init__(self, *, blocked: bool = False) -> None:
        self.groups: list[Group] = []
        self.running = 0
        self.most_running = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._go = threading.Event()
        if not blocked:
            self._go.set()

    def __call__(self, group: Group) -> None:
        with self._lock:
            self.groups.append(group)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        assert self._go.wait(30)
        with self._lock:
            self.running -= 1
        if self.error is not None:
            raise self.error

    def go(self) -> None:
        self._go.set()


def packer_of(upload: Uploads, **changed: float) -> Packer:
    values = {"group_bytes": 1 << 20, "uploads": 2, "writers": 8, "linger_s": 20.0, **changed}
    return Packer(upload, **values)  # type: ignore[arg-type]


def write_all(packer: Packer, count: int, pages: int = 1) -> list[BaseException | None]:
    buffers = [FrameBuffer(pages * SECTOR_BYTES) for _ in range(count)]

    def write(number: int) -> BaseException | None:
        frame = buffers[number].fill(key_of(number), pages * SECTOR_BYTES)
        try:
            packer.write(*frame)
        except TierError as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(write, range(count)))


def test_all_writers_share_one_upload_and_nobody_waits_for_more() -> None:
    """The linger is 20 s and there is no other writer. A wait for it would exceed the test's time
    limit."""
    uploads = Uploads()
    packer = packer_of(uploads, linger_s=1000.0)
    assert write_all(packer, 8) == [None] * 8
    assert [sorted(group.keys) for group in uploads.groups] == [sorted(map(key_of, range(8)))]
    assert packer.stats() == {"groups": 1, "grouped_blocks": 8}


def test_a_lone_writer_goes_after_the_linger() -> None:
    uploads = Uploads()
    assert write_all(packer_of(uploads, linger_s=0.001), 1) == [None]
    assert len(uploads.groups) == 1


def test_a_full_group_goes_without_lingering() -> None:
    uploads = Uploads()
    packer = packer_of(uploads, writers=100, group_bytes=4 * SECTOR_BYTES, linger_s=1000.0)
    assert write_all(packer, 8) == [None] * 8
    assert [len(group.keys) for group in uploads.groups] == [2] * 4
    assert all(group.nbytes == 4 * SECTOR_BYTES for group in uploads.groups)


def test_a_frame_larger_than_a_group_goes_alone() -> None:
    uploads = Uploads()
    packer = packer_of(uploads, writers=100, group_bytes=4 * SECTOR_BYTES, linger_s=1000.0)
    assert write_all(packer, 3, pages=9) == [None] * 3
    assert [len(group.keys) for group in uploads.groups] == [1] * 3


def test_nothing_is_copied() -> None:
    uploads = Uploads()
    buffer = FrameBuffer(SECTOR_BYTES)
    packer_of(uploads, linger_s=0.0).write(*buffer.fill(key_of(1), SECTOR_BYTES))
    header, payload = uploads.groups[0].views
    assert header.obj is buffer.header.obj
    assert payload.obj is buffer.payload.obj


def test_no_more_uploads_run_than_allowed_and_those_who_wait_are_joined() -> None:
    uploads = Uploads(blocked=True)
    packer = packer_of(uploads, writers=100, linger_s=0.0, uploads=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(write_all, packer, 1)
        while not uploads.groups:
            time.sleep(0.001)
        with ThreadPoolExecutor(1) as more:
            rest = more.submit(write_all, packer, 6)
            while packer._writers_inside < 7:
                time.sleep(0.001)
            uploads.go()
            assert rest.result() == [None] * 6
        assert first.result() == [None]
    assert uploads.most_running == 1
    assert [len(group.keys) for group in uploads.groups] == [1, 6]


@pytest.mark.parametrize("error", [TierUnavailable("away"), TierFull("full"), TierError("no")])
def test_a_failed_upload_fails_every_writer_with_an_error_of_its_own(error: TierError) -> None:
    uploads = Uploads()
    uploads.error = error
    found = write_all(packer_of(uploads, writers=4), 4)
    assert [type(each) for each in found] == [type(error)] * 4
    assert [str(each) for each in found] == [str(error)] * 4
    assert len(set(map(id, found))) == 4


# -------------------------------------------------------------------- concurrent requests


def test_several_at_once_answer_in_order_and_one_fault_ends_them() -> None:
    objects = Objects(None, "", 1, 0.0)  # type: ignore[arg-type]
    assert list(objects.map_concurrently(lambda number: number * 2, range(50))) == [
        2 * n for n in range(50)
    ]
    asked: list[int] = []

    def fail_at_nine(number: int) -> int:
        asked.append(number)
        if number == 9:
            raise TierUnavailable("away")
        time.sleep(0.001 * (number > 9))
        return number

    found = objects.map_concurrently(fail_at_nine, range(10_000))
    with pytest.raises(TierUnavailable):
        list(found)
    before = len(asked)
    assert before < 10_000, "the remaining items were not cancelled"
    time.sleep(0.05)
    assert len(asked) == before, "a thread is still working"


def test_requests_that_hang_keep_no_process_from_ending() -> None:
    program = """
import threading
from kvstore.tiers.s3.objects import Objects
hanging = threading.Semaphore(0)

def hang(_):
    hanging.release()
    threading.Event().wait()

def ask():
    list(Objects(None, "", 1, 0.0).map_concurrently(hang, [1, 2, 3]))

threading.Thread(target=ask, daemon=True).start()
for _ in range(3):
    hanging.acquire()
print("ends", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, timeout=60, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"ends\n")


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "error"),
    [
        (503, "SlowDown", "slow_down", TierUnavailable),
        (503, "", "slow_down", TierUnavailable),
        (429, "", "slow_down", TierUnavailable),
        (500, "InternalError", "server", TierUnavailable),
        (400, "RequestTimeout", "server", TierUnavailable),
        (409, "OperationAborted", "server", TierUnavailable),
        (403, "AccessDenied", "credentials", TierUnavailable),
        (403, "SignatureDoesNotMatch", "credentials", TierUnavailable),
        (400, "ExpiredToken", "credentials", TierUnavailable),
        (404, "NoSuchBucket", "bucket", TierUnavailable),
        (301, "PermanentRedirect", "bucket", TierUnavailable),
        (400, "InvalidRequest", "request", TierError),
        (501, "NotImplemented", "request", TierError),
        (507, "InsufficientStorage", "full", TierFull),
        (403, "QuotaExceeded", "full", TierFull),
        (404, "NoSuchKey", "missing", faults.Missing),
    ],
)
def test_every_reply_has_its_kind(status: int, code: str, kind: str, error: type) -> None:
    body = f"<Error><Code>{code}</Code><Message>AKIASECRET</Message></Error>".encode()
    fault = faults.from_reply(status, body if code else b"", {}, "GET x")
    assert isinstance(fault, error)
    assert fault.kind == kind  # type: ignore[union-attr]
    assert kind in faults.KINDS
    assert "AKIASECRET" not in str(fault)
    assert not isinstance(fault, TierUnavailable) or error is TierUnavailable


def test_a_redirect_says_where_the_bucket_is() -> None:
    fault = faults.from_reply(301, b"", {"x-amz-bucket-region": "eu-central-1"}, "GET x")
    assert "eu-central-1" in str(fault)


def test_a_failed_conditional_put_is_not_an_error() -> None:
    assert isinstance(faults.from_reply(412, b"", {}, "PUT x"), faults.Exists)


# -------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"bukcet": "x"}, "bucket"),
        ({"prefix": "a b/"}, "prefix"),
        ({"encryption": "AES-256"}, "AES256"),
        ({"kms_key": "k"}, "aws:kms"),
        ({"access_key": "AKIAONLY"}, "set both access_key and secret_key"),
        ({"endpoint": "localhost:1"}, "http://"),
        ({"shards": 0}, "shards"),
        ({"capacity": 5}, "capacity"),
        ({"gc_grace": 1, "list_interval": 1000}, "gc_grace"),
        ({"bucket": "no such/name"}, "bucket"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(changed: dict[str, object], word: str) -> None:
    values = {"bucket": "some-bucket", "endpoint": "http://127.0.0.1:1", **changed}
    with pytest.raises(ConfigError) as caught:
        s3.open(validate(s3.Config, values, "tiers.0"))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "AKIAONLY" not in str(caught.value)


def test_secrets_are_never_shown() -> None:
    config = s3.Config(bucket="some-bucket", access_key="AKIA", secret_key="hush")  # type: ignore[arg-type]
    assert "hush" not in repr(config) + str(config.model_dump()) + config.model_dump_json()
    with pytest.raises(ConfigError) as caught:
        validate(s3.Config, {"bucket": "b", "secret_key": ["hush"], "session_token": {"a": "hush"}})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(("given", "kept"), [("", ""), ("/", ""), ("a", "a/"), ("/a/b/", "a/b/")])
def test_a_prefix_ends_in_a_slash(given: str, kept: str) -> None:
    assert s3.Config(bucket="some-bucket", prefix=given).prefix == kept
