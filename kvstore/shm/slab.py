"""The slab: one anonymous memory file of equal slots that every process of the node can map.

A slot has room for one block. The L2 manager (`cache/manager.py`) decides which process may use a
slot; this module only knows bytes. The memory has no name in any file system, so nothing remains
when its processes end. Another process receives its file descriptor over a Unix socket and maps it.

At creation the memory is allocated, pre-faulted and, as far as the limit on locked memory allows,
locked. The first access to a page runs at a twentieth of the memory's speed, and a page that could
be swapped out cannot be the source of a device copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from typing import Final, NoReturn, cast

from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError, StoreClosed
from kvstore.forks import INHERITED, on_fork

log = logging.getLogger(__name__)

IO_ALIGNMENT: Final = 4096
MAX_MEMORY_FRACTION: Final = 0.95
"""Maximum fraction of the available memory that a slab may take; the rest is for other needs."""
_MFD_HUGETLB: Final = 0x0004
# fcntl has these names only since Python 3.12; the numbers are those of Linux.
_F_ADD_SEALS: Final = 1033
_F_SEAL_SIZE: Final = 0x1 | 0x2 | 0x4
"""The size is final: if a client truncated the file, the sidecar's next access would kill it."""
_MADV_POPULATE_WRITE: Final = 23
_HUGE_PAGE_BYTES: Final = 2 << 20


class InheritedMemory:
    """Takes the place of a slab's memory in a forked child, which must not write into it."""

    def __getitem__(self, part: slice) -> NoReturn:
        raise StoreClosed(f"this slab was {INHERITED}")


class Slab:
    """Shared memory of `slots` slots of `slot_bytes` bytes each (a multiple of 4,096)."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Map an existing memory file; the slab now owns `fd`."""
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        # mmap must not populate: it keeps the GIL, so a reconnect would stop the engine.
        self._map = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED)
        self._view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address: int = ctypes.addressof(anchor)
        """Address of the slab in this process."""
        del anchor
        _populate(self.address, self.nbytes)
        self.locked = _lock(self.address, self.nbytes)
        """Whether the pages are locked in memory."""
        self._closed = False
        self._before_unmapping: list[Callable[[], None]] = []
        on_fork(self._let_go)

    @classmethod
    def create(
        cls,
        slots: int,
        slot_bytes: int,
        *,
        directory: str | None = None,
        huge_pages: bool = False,
    ) -> Slab:
        """Allocate a slab.

        slot_bytes: rounded up to a multiple of 4,096 bytes.
        directory: a memory file system to allocate from (/dev/shm, a hugetlbfs mount); None:
            anonymous memory, which `--shm-size` does not limit.
        huge_pages: take anonymous memory from the system's pool of 2 MiB pages.

        Raises:
            ConfigError: the slab does not fit; says how much is available and what to change.
        """
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(
                f"slab: count and size of slots must be positive (got {slots} x {slot_bytes} bytes)"
            )
        slot_bytes = (slot_bytes + IO_ALIGNMENT - 1) & -IO_ALIGNMENT
        nbytes = slots * slot_bytes
        if not huge_pages:
            _check_memory(nbytes, directory)
        fd = _memory_file(directory, huge_pages)
        try:
            page_bytes = _HUGE_PAGE_BYTES if huge_pages else IO_ALIGNMENT
            if directory:
                page_bytes = os.fstatvfs(fd).f_bsize  # on hugetlbfs, the size of a huge page
            size = -(-nbytes // page_bytes) * page_bytes
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            if not directory:
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SIZE)
            return cls(fd, slots, slot_bytes)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ConfigError(_too_large(nbytes, None, directory, huge_pages)) from None
            raise

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> Slab:
        """Map the slab of a file descriptor received from its owner; closes `fd` on failure.

        Raises ConfigError: the sizes are invalid, or the file is smaller than `slots * slot_bytes`.
        An access beyond the end of the file would kill this process.
        """
        try:
            size = os.fstat(fd).st_size
            if slots < 1 or slot_bytes < IO_ALIGNMENT or slot_bytes % IO_ALIGNMENT:
                raise ConfigError(f"invalid slab: {slots} slots of {slot_bytes} bytes")
            if size < slots * slot_bytes:
                raise ConfigError(
                    f"the slab file has {size} bytes; expected {slots} x {slot_bytes} bytes"
                )
            return cls(fd, slots, slot_bytes)
        except BaseException:
            os.close(fd)
            raise

    def view(self, slot: int) -> memoryview:
        """Writable bytes of one slot, `slot_bytes` long and 4 KiB aligned."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def before_unmapping(self, callback: Callable[[], None]) -> None:
        """Register a callback for `close`. It runs in the thread of `close` while the memory is
        still mapped: for a caller that registered the addresses with a device."""
        self._before_unmapping.append(callback)

    def close(self) -> None:
        """Release the memory. It stays mapped until the last view of it is gone."""
        if self._closed:
            return
        self._closed = True
        for call in self._before_unmapping:
            call()
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("slab still has views at close; it is unmapped with the last one")
        os.close(self.fd)

    def _let_go(self) -> None:
        """In a forked child: unmap the memory, so that it is freed when the parent frees it.

        A view that the child inherited stays mapped. No callback runs: the device is the parent's.
        """
        if self._closed:
            return
        self._closed = True
        view, self._view = self._view, cast(memoryview, InheritedMemory())
        with contextlib.suppress(BufferError):
            view.release()
            self._map.close()
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"slab of {self.slots} x {format_bytes(self.slot_bytes)}"


def available_bytes() -> int:
    """Available memory: the smaller of the system's and that of our cgroup."""
    return min(_system_available(), _cgroup_available())


def _memory_file(directory: str | None, huge_pages: bool) -> int:
    """A file descriptor of an empty, nameless memory file."""
    if directory:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"slab directory {directory!r}: {error.strerror}; "
                "use a writable memory file system such as /dev/shm"
            ) from None
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB if huge_pages else 0)
    return os.memfd_create("kvstore-slab", flags)


def _check_memory(nbytes: int, directory: str | None) -> None:
    """Reject a slab that cannot fit before allocating it; else the kernel would kill this process.

    Huge pages are not checked: they are reserved, so neither the system's available memory nor our
    cgroup's memory limit includes them. If there are too few, the allocation fails cleanly.
    """
    try:
        status = os.statvfs(directory) if directory else None
    except OSError as error:
        raise ConfigError(f"slab directory {directory!r}: {error.strerror}") from None
    # hugetlbfs reports the size of its pages.
    reserved = status is not None and status.f_bsize >= _HUGE_PAGE_BYTES
    room = int(available_bytes() * MAX_MEMORY_FRACTION)
    if nbytes > room and not reserved:
        raise ConfigError(_too_large(nbytes, room, directory, False))
    if status is None:
        return
    left = status.f_bavail * status.f_frsize
    if nbytes > left:
        raise ConfigError(_too_large(nbytes, left, directory, False))


def _too_large(nbytes: int, room: int | None, directory: str | None, huge_pages: bool) -> str:
    """One line: requested size, available size, what to change."""
    have = "" if room is None else f"; {format_bytes(room)} are available"
    where = f" in {directory}" if directory else ""
    if huge_pages:
        how = "raise vm.nr_hugepages, or set l2.huge_pages = false"
    elif directory:
        how = f"lower l2.bytes (--l2), or raise the size of {directory} (docker: --shm-size)"
    else:
        how = (
            "lower l2.bytes (--l2), or raise the container's memory limit "
            "(docker: --memory; --shm-size if the slab is in /dev/shm)"
        )
    return f"a slab of {format_bytes(nbytes)} does not fit{where}{have}; {how}"


def _populate(address: int, nbytes: int) -> None:
    """Fill the page tables; a kernel before 5.14 lacks the call and does so at first access."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) != 0:
        log.info("slab not pre-faulted: %s", os.strerror(ctypes.get_errno()))


def _lock(address: int, nbytes: int) -> bool:
    """Lock the memory, if RLIMIT_MEMLOCK allows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    if done != 0:
        log.info("slab not locked in memory: %s", os.strerror(ctypes.get_errno()))
    return done == 0


def _system_available() -> int:
    """MemAvailable of /proc/meminfo."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available() -> int:
    """Memory left below the limit of our cgroup (version 2 or 1); 2**62 without a limit."""
    for limit_name, used_name in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            with open(limit_name) as limit, open(used_name) as used:
                text = limit.read().strip()
                if text.isdigit():
                    return max(0, int(text) - int(used.read()))
        except OSError:
            continue
    return 1 << 62
