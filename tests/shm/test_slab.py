"""The slab: shared by descriptor, aligned, nameless, and rejected in one line if too large."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.shm.slab import Slab, available_bytes

READER = """
import socket, sys
from kvstore.shm.slab import Slab
sock = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(sock, 1, 1)
slab = Slab.attach(fds[0], int(sys.argv[2]), int(sys.argv[3]))
print(bytes(slab.view(2)[:5]).decode(), flush=True)
slab.view(0)[:6] = b"answer"
slab.close()
"""

MAKER = """
import sys, time
from kvstore.shm.slab import Slab
slab = Slab.create(16, 1 << 20, directory=sys.argv[1] or None)
slab.view(3)[:4] = b"here"
print("up", flush=True)
time.sleep(60)
"""


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_another_process_sees_the_bytes() -> None:
    slab = Slab.create(3, 8192)
    slab.view(2)[:5] = b"hello"
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", READER, str(theirs.fileno()), "3", "8192"],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    with ours, theirs:
        socket.send_fds(ours, [b"."], [slab.fd])
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert out.strip() == "hello"
    assert bytes(slab.view(0)[:6]) == b"answer"
    slab.close()


@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_slots_are_pages_apart_and_do_not_overlap(directory: str | None) -> None:
    slab = Slab.create(5, 5000, directory=directory)
    assert slab.slot_bytes == 8192
    assert slab.nbytes == 5 * 8192
    assert slab.address % mmap.PAGESIZE == 0
    for slot in range(5):
        view = slab.view(slot)
        assert len(view) == 8192
        assert not view.readonly
        view[:] = bytes([slot]) * 8192
    for slot in range(5):
        assert bytes(slab.view(slot)) == bytes([slot]) * 8192
    slab.close()


def test_two_mappings_are_one_memory() -> None:
    slab = Slab.create(2, 4096)
    other = Slab.attach(os.dup(slab.fd), 2, 4096)
    other.view(1)[:3] = b"abc"
    assert bytes(slab.view(1)[:3]) == b"abc"
    other.close()
    assert bytes(slab.view(1)[:3]) == b"abc"
    slab.close()


@pytest.mark.parametrize("directory", ["", "/dev/shm"])
def test_a_kill_leaves_nothing_behind(directory: str) -> None:
    before = _shared_memory()
    child = subprocess.Popen(
        [sys.executable, "-c", MAKER, directory], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "up"
    assert _shared_memory() <= before, "the slab has a name while it is used"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    child.stdout.close()
    assert _shared_memory() <= before


@pytest.mark.parametrize(
    ("directory", "advice"), [(None, "memory limit"), ("/dev/shm", "--shm-size")]
)
def test_too_large_is_one_line_that_says_what_to_change(directory: str | None, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Slab.create(1 << 30, 1 << 20, directory=directory)
    text = str(caught.value)
    assert "\n" not in text
    assert "1 PiB" in text
    assert advice in text
    assert "available" in text
    assert available_bytes() < 1 << 50


def test_too_few_huge_pages_are_reported_without_a_check_of_other_memory() -> None:
    """Huge pages are reserved: other available memory does not count."""
    with pytest.raises(ConfigError, match="nr_hugepages") as caught:
        Slab.create(1 << 30, 1 << 20, huge_pages=True)
    assert "available" not in str(caught.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        Slab.create(1, 4096, directory=missing)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (-1, 4096)])
def test_sizes_must_be_positive(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        Slab.create(slots, slot_bytes)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(3, 4096), (2, 8192), (2, 100), (0, 4096)])
def test_attach_rejects_sizes_that_do_not_fit_the_file(slots: int, slot_bytes: int) -> None:
    slab = Slab.create(2, 4096)
    fd = os.dup(slab.fd)
    with pytest.raises(ConfigError):
        Slab.attach(fd, slots, slot_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    slab.close()


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_no_client_can_resize_it(nbytes: int) -> None:
    """An access beyond the end of a truncated file kills the process."""
    slab = Slab.create(2, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, nbytes)
    slab.close()


def test_views_outlive_close() -> None:
    slab = Slab.create(1, 4096)
    view = slab.view(0)
    view[:4] = b"kept"
    slab.close()
    slab.close()
    assert bytes(view[:4]) == b"kept"


def test_a_slot_outside_the_slab_raises() -> None:
    slab = Slab.create(2, 4096)
    for slot in (-1, 2):
        with pytest.raises(AssertionError):
            slab.view(slot)
    slab.close()
