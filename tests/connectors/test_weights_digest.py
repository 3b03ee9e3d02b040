"""Fingerprints of weights, on real files: every byte counts, and records are never wrong."""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

from kvstore.connectors.common import digest_records, file_digests
from kvstore.connectors.common.engine_start import engine_start_s
from kvstore.connectors.common.file_digests import digest_files
from kvstore.connectors.common.weights_digest import (
    UNSHARED,
    fingerprint,
    loaded_commit_id,
    loaded_weights_id,
)

SETTLED_S = 0.02
"""More than a tick of any kernel."""
PART_BYTES = 64 << 10
LIMIT_S = 60.0
COMMIT = "0123456789abcdef" * 2 + "01234567"

PROGRAM = f"""
import sys
from pathlib import Path
from kvstore.connectors.common import digest_records, file_digests
file_digests.PART_BYTES = {PART_BYTES}
digest_records.SETTLED_S = {SETTLED_S}
digest_records.SURE = {{int(sys.argv[1]): "this one"}}
sys.stdin.readline()
found = file_digests.digest_files([Path(name) for name in sys.argv[2:]])
print(found.files_read, *found.digests)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small parts, files are remembered soon, and this file system counts as sure. Returns the
    folder of the records."""
    file_system = digest_records._file_system_type(tmp_path)
    monkeypatch.setattr(digest_records, "SURE", {file_system: "this one"})
    monkeypatch.setattr(digest_records, "SETTLED_S", SETTLED_S)
    monkeypatch.setattr(file_digests, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(file_digests, "RECORDED_MIN_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvstore" / "weights"


@pytest.fixture
def engine() -> Iterator[Pool]:
    """A process of an engine, which has started."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(engine_start_s) is not None
        yield pool


def shards(folder: Path, count: int = 3) -> list[Path]:
    """Shards of several parts and of odd sizes, that do not change any more."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"model-{number:05}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * (2 * PART_BYTES * number + 1000))
    settle(files)
    return files


def settle(files: list[Path]) -> None:
    while time.time() < max(file.stat().st_ctime for file in files) + 2 * SETTLED_S:
        time.sleep(SETTLED_S / 4)


def change_byte(file: Path, place: int, change: int) -> None:
    """Change one byte in place. Size and modification time stay."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        (old,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([old ^ change]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_any_byte_changed_in_place_is_seen(tmp_path: Path, recorded: Path) -> None:
    """At any place of any shard, whether or not the shards are remembered."""
    hypothesis = pytest.importorskip("hypothesis")
    given, strategies = hypothesis.given, hypothesis.strategies
    files = shards(tmp_path / "model")
    first = fingerprint(tmp_path / "model")
    seen = {first}

    @hypothesis.settings(max_examples=40, deadline=None)
    @given(strategies.data())
    def check(data: hypothesis.strategies.DataObject) -> None:
        file = data.draw(strategies.sampled_from(files))
        place = data.draw(strategies.integers(0, file.stat().st_size - 1))
        change = data.draw(strategies.integers(1, 255))
        remembered = data.draw(strategies.booleans())
        if remembered:
            settle(files)
            assert fingerprint(tmp_path / "model") == first
        change_byte(file, place, change)
        changed = fingerprint(tmp_path / "model")
        assert changed != first
        seen.add(changed)
        change_byte(file, place, change)
        assert fingerprint(tmp_path / "model") == first

    check()
    assert len(seen) > 20


def test_the_fingerprint_does_not_depend_on_the_place_of_the_files(
    tmp_path: Path, recorded: Path
) -> None:
    """A copy, links to the files, and a link to the folder have the same fingerprint."""
    files = shards(tmp_path / "model")
    first = fingerprint(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in files:
        (linked / file.name).symlink_to(file)
    (tmp_path / "link").symlink_to(linked)
    for folder in ("copy", "linked", "link"):
        assert fingerprint(tmp_path / folder) == first
    change_byte(files[2], 70_000, 1)
    assert fingerprint(tmp_path / "link") != first
    assert fingerprint(tmp_path / "copy") == first
    assert fingerprint(tmp_path / "model") != first


def test_what_determines_how_weights_are_read_counts(tmp_path: Path) -> None:
    shards(tmp_path / "model")
    seen = {fingerprint(tmp_path / "model")}
    for name in ("model.safetensors.index.json", "modeling_mine.py", "quantize_config.json"):
        (tmp_path / "model" / name).write_text("{}")
        seen.add(fingerprint(tmp_path / "model"))
    assert len(seen) == 4
    (tmp_path / "model" / "README.md").write_text("about it")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert fingerprint(tmp_path / "model") in seen
    assert fingerprint(tmp_path / "model", ["config.json"]) not in seen


def test_files_are_read_once(tmp_path: Path, recorded: Path) -> None:
    files = shards(tmp_path / "model")
    first = digest_files(files)
    assert (first.files_read, first.bytes_read) == (3, sum(file.stat().st_size for file in files))
    again = digest_files(files)
    assert (again.files_read, again.bytes_read, again.digests) == (0, 0, first.digests)
    change_byte(files[1], 0, 1)
    third = digest_files(files)
    assert third.files_read == 1
    assert [a == b for a, b in zip(first.digests, third.digests, strict=True)] == [
        True,
        False,
        True,
    ]
    assert digest_files(files[:1], file_digests.SHA256).digests == [
        hashlib.sha256(files[0].read_bytes()).hexdigest()
    ], "another algorithm has its own records"


def test_small_files_leave_no_records(tmp_path: Path, recorded: Path) -> None:
    file_digests.RECORDED_MIN_BYTES = 4 << 20  # the fixture restores it
    files = shards(tmp_path / "model")
    assert [digest_files(files).files_read for _ in range(2)] == [3, 3]
    assert not recorded.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.write_bytes(b""),
        lambda record: record.write_bytes(record.read_bytes()[:-1]),
        lambda record: record.write_bytes(
            record.read_bytes().replace(b'"digest": "', b'"digest": "f')
        ),
        lambda record: record.write_bytes(os.urandom(300)),
        lambda record: record.write_bytes(bytes(1 << 20)),
        lambda record: record.chmod(0o666),
        lambda record: (record.rename(f"{record}.x"), record.symlink_to(f"{record}.x")),
        lambda record: (record.unlink(), record.mkdir()),
    ],
    ids=["empty", "cut", "digest", "random", "large", "writable", "link", "folder"],
)
def test_a_corrupt_or_foreign_record_means_that_the_file_is_read(
    tmp_path: Path, recorded: Path, spoil: Callable[[Path], object]
) -> None:
    files = shards(tmp_path / "model")
    first = digest_files(files).digests
    for record in list(recorded.glob("*.json")):
        spoil(record)
    again = digest_files(files)
    assert (again.files_read, again.digests) == (3, first)


def test_a_record_of_another_file_is_not_used(tmp_path: Path, recorded: Path) -> None:
    """The records' names are exchanged, and one record is of a later format."""
    files = shards(tmp_path / "model")
    first = digest_files(files).digests
    one, other, third = recorded.glob("*.json")
    one.rename(f"{one}.x")
    other.rename(one)
    Path(f"{one}.x").rename(other)
    text = third.read_text().splitlines()[0].replace('"format": 1', '"format": 2')
    third.write_text(f"{text}\n{digest_records.xxhash.xxh3_64_hexdigest(text.encode())}")
    again = digest_files(files)
    assert (again.files_read, again.digests) == (3, first)


def test_where_no_record_can_be_kept_files_are_read(
    tmp_path: Path, recorded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = shards(tmp_path / "model")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [digest_files(files).files_read for _ in range(2)] == [3, 3]
    assert "read again" in caplog.text


def test_a_file_system_whose_times_are_unsure_is_not_remembered(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = shards(tmp_path / "model")
    monkeypatch.setattr(digest_records, "SURE", {})
    assert [digest_files(files).files_read for _ in range(2)] == [3, 3]


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, recorded: Path) -> None:
    """A second change within one tick of the file system's clock would have the same times."""
    files = shards(tmp_path / "model")
    digest_records.SETTLED_S = LIMIT_S  # the fixture restores it
    assert [digest_files(files).files_read for _ in range(2)] == [3, 3]


def test_a_write_through_a_mapping_that_existed_before_is_seen(
    tmp_path: Path, recorded: Path
) -> None:
    """The kernel moves the file's times only at a page's first write after it was written back."""
    if digest_records._file_system_type(tmp_path) not in (0xEF53, 0x58465342, 0x9123683E):
        pytest.skip("not a file system that is sure")
    files = shards(tmp_path / "model")
    with files[1].open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[5000] ^= 1
        settle(files)
        first = digest_files(files)
        before = files[1].stat()
        settle(files)
        mapped[5001] ^= 1  # on the page that was written to before
        os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
        second = digest_files(files)
    assert first.digests[1] != second.digests[1]


def test_the_oldest_records_are_deleted(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_records, "RECORDS_MAX", 4)
    files = shards(tmp_path / "model", 9)
    first = digest_files(files).digests
    assert len(list(recorded.glob("*.json"))) <= 4
    assert digest_files(files).digests == first


def start(files: list[Path]) -> subprocess.Popen[str]:
    file_system = digest_records._file_system_type(files[0])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file_system), *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_several_processes_at_once_read_once(tmp_path: Path, recorded: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    files = [folder / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * (8 << 20))
    settle(files)
    processes = [start(files) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=LIMIT_S)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(answer[0] for answer in answers) == ["0", "0", "0", "3"]
    assert {tuple(answer[1:]) for answer in answers} == {tuple(digest_files(files).digests)}


def test_a_killed_process_does_not_stop_the_next(tmp_path: Path, recorded: Path) -> None:
    files = shards(tmp_path / "model")
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from kvstore.connectors.common.digest_records import DigestRecords\n"
        "with DigestRecords(Path(sys.argv[1])).lock(sys.argv[2]):\n"
        "    print('locked', flush=True); time.sleep(600)"
    )
    arguments = [str(recorded), str(files[0].resolve().parent)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    process.kill()
    assert digest_files(files).files_read == 3
    process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("how", ["written", "replaced", "cut"])
def test_a_change_while_files_are_read_is_noticed(
    tmp_path: Path,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    files = shards(tmp_path / "model")
    (tmp_path / "new").write_bytes(files[2].read_bytes())
    hash_part = file_digests._Hasher.hash_part
    changes = [how]

    def hash_and_change(self: file_digests._Hasher, part: file_digests._Part) -> bytes:
        digest = hash_part(self, part)
        if changes:
            changes.clear()
            if how == "written":
                change_byte(files[0], 0, 1)
            elif how == "replaced":
                os.replace(tmp_path / "new", files[2])
            else:
                os.truncate(files[2], 70_000)
        return digest

    monkeypatch.setattr(file_digests._Hasher, "hash_part", hash_and_change)
    assert loaded_weights_id(tmp_path / "model").startswith(UNSHARED)
    assert "while it was read" in caplog.text
    assert not list(recorded.glob("*.json"))
    assert loaded_weights_id(tmp_path / "model") == fingerprint(tmp_path / "model")


def test_ranks_of_one_start_read_once_also_where_times_are_unsure(
    tmp_path: Path, recorded: Path, engine: Pool
) -> None:
    """A file of 4 MiB: the engine's process has the constants of the package."""
    file = tmp_path / "model.safetensors"
    settled = True
    while settled:  # until no later process may rely on the file's times
        file.write_bytes(bytes(4 << 20))
        assert [engine.apply(digest_files, ([file],)).files_read for _ in range(2)] == [1, 0]
        (record,) = recorded.glob("*.json")
        settled = json.loads(record.read_text().splitlines()[0])["settled"]
    with multiprocessing.get_context("spawn").Pool(1) as later:
        assert later.apply(digest_files, ([file],)).files_read == 1
    assert engine.apply(digest_files, ([file],)).files_read == 0


def changed_file(folder: Path) -> None:
    change_byte(folder / "model-00002.safetensors", 70_000, 1)


def renamed_folder(folder: Path) -> None:
    folder.rename(f"{folder}.old")
    Path(f"{folder}.new").rename(folder)


def other_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.unlink()
    link.symlink_to(f"{folder}.new")


@pytest.mark.parametrize("change", [changed_file, renamed_folder, other_link])
def test_weights_that_changed_after_the_engine_started_are_not_shared(
    tmp_path: Path, recorded: Path, change: Callable[[Path], None]
) -> None:
    """The engine may have loaded them before the change."""
    folder = tmp_path / "model"
    shards(folder)
    shards(tmp_path / "model.new", 2)
    (tmp_path / "link").symlink_to(folder)
    used = tmp_path / "link" if change is other_link else folder
    time.sleep(0.15)
    with multiprocessing.get_context("spawn").Pool(1) as engine:
        assert engine.apply(engine_start_s) is not None
        assert engine.apply(loaded_weights_id, (used,)) == engine.apply(fingerprint, (used,))
        change(folder)
        found = [engine.apply(loaded_weights_id, (used,)) for _ in range(2)]
        assert all(each.startswith(UNSHARED) for each in found)
        assert found[0] != found[1]
    time.sleep(0.15)
    with multiprocessing.get_context("spawn").Pool(1) as engine:
        assert engine.apply(loaded_weights_id, (used,)) == engine.apply(fingerprint, (used,))


class HubCache:
    """A model in a hub's cache, as huggingface_hub lays it out."""

    name = "org/model"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "models--org--model"
        self.snapshot = self.repository / "snapshots" / COMMIT
        self.snapshot.mkdir(parents=True)
        (self.repository / "blobs").mkdir()
        for number in range(2):
            data = bytes([number]) * 200_000
            self.add(f"model-{number}.safetensors", data, hashlib.sha256(data).hexdigest())
        data = b'{"weight_map": {}}'
        self.add(
            "model.safetensors.index.json",
            data,
            hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        )

    def add(self, name: str, data: bytes, digest: str) -> None:
        (self.repository / "blobs" / digest).write_bytes(data)
        (self.snapshot / name).symlink_to(f"../../blobs/{digest}")

    def id(self) -> str:
        return loaded_commit_id(self.name, COMMIT, str(self.folder))


@pytest.fixture
def hub(tmp_path: Path, recorded: Path) -> HubCache:
    pytest.importorskip("huggingface_hub")
    return HubCache(tmp_path / "hub")


def test_a_snapshot_of_the_hub_is_its_commit(hub: HubCache, recorded: Path) -> None:
    settle(list((hub.repository / "blobs").iterdir()))
    assert hub.id() == COMMIT[:16]
    assert len(list(recorded.glob("*.json"))) == 3, "the next start reads nothing"
    shutil.rmtree(hub.folder)
    assert hub.id() == COMMIT[:16], "no copy here that anyone could have edited"


def test_a_partial_snapshot_is_found_too(hub: HubCache) -> None:
    """Engines download only files that they need. The hub's library knows that others exist."""
    entry = {"size": 3, "blob_id": "1" * 40}
    entries = {"format_version": 1, "files": {"README.md": entry}}
    (hub.repository / "trees").mkdir()
    (hub.repository / "trees" / f"{COMMIT}.json").write_text(json.dumps(entries))
    assert hub.id() == COMMIT[:16]
    change_byte(hub.snapshot / "model-0.safetensors", 100_000, 1)
    assert hub.id() != COMMIT[:16]


@pytest.mark.parametrize("remembered", [False, True])
def test_an_edit_within_the_hubs_cache_is_seen(
    hub: HubCache, remembered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if remembered:
        settle(list((hub.repository / "blobs").iterdir()))
        assert hub.id() == COMMIT[:16]
    change_byte(hub.snapshot / "model-1.safetensors", 199_999, 128)
    edited = hub.id()
    assert edited == fingerprint(hub.snapshot)
    assert "model-1.safetensors is not the file of commit" in caplog.text
    change_byte(hub.snapshot / "model-1.safetensors", 199_999, 128)
    assert hub.id() == COMMIT[:16]
    change_byte(hub.snapshot / "model.safetensors.index.json", 3, 1)
    assert hub.id() not in (COMMIT[:16], edited)


def test_a_file_in_place_of_a_snapshots_link_is_seen(hub: HubCache, tmp_path: Path) -> None:
    file = hub.snapshot / "model-1.safetensors"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)
    assert hub.id() == fingerprint(hub.snapshot)
    file.unlink()
    (tmp_path / "tuned").write_bytes(data)
    file.symlink_to(tmp_path / "tuned")
    assert hub.id() == fingerprint(hub.snapshot)


def test_blobs_in_a_store_of_several_repositories(hub: HubCache, tmp_path: Path) -> None:
    """The hub's library links blobs to a store whose names are other digests."""
    (tmp_path / "store").mkdir()
    for number, blob in enumerate((hub.repository / "blobs").iterdir()):
        moved = tmp_path / "store" / f"{number:064}"
        blob.rename(moved)
        blob.symlink_to(moved)
    assert hub.id() == COMMIT[:16]
    change_byte(hub.snapshot / "model-1.safetensors", 0, 1)
    assert hub.id() == fingerprint(hub.snapshot)
