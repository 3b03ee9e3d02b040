"""The slab: one anonymous memory file of equal slots, which every process of the node can map.

A slot holds one block. Who may touch a slot is the brain's business (`tiers/manager.py`): this
file knows bytes only. The memory has no name in any file system, so nothing is left behind however
its processes end; another process gets it by its file descriptor (over a Unix socket) and maps it.

Memory is allocated, pre-faulted and, where the limit on locked memory allows, locked at creation:
first touch runs at a twentieth of memory's speed, and a page that could be swapped out cannot be
the source of a device copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from typing import Final

from kvstore.config.units import format_bytes
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096
MEMORY_HEADROOM: Final = 0.95
"""Share of the available memory that a slab may take; the rest is for everybody's small needs."""
_MFD_HUGETLB: Final = 0x0004
# fcntl names these only since Python 3.12; the numbers are Linux' own.
_F_ADD_SEALS: Final = 1033
_F_SEAL_SIZE: Final = 0x1 | 0x2 | 0x4
"""The size is final: a client that cut the file short would kill the sidecar at its next touch."""
_MADV_POPULATE_WRITE: Final = 23
_HUGE_PAGE_BYTES: Final = 2 << 20


class Slab:
    """`slots` slots of `slot_bytes` bytes (a multiple of 4,096) in shared memory."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Map an existing memory file; the slab owns `fd` from here on."""
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        # Not populated by mmap, which holds the interpreter's lock: a redial would stop the engine.
        self._map = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED)
        self._view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address: int = ctypes.addressof(anchor)
        """Where the slab lies in this process."""
        del anchor
        _populate(self.address, self.nbytes)
        self.locked = _lock(self.address, self.nbytes)
        """Whether its pages are locked in memory."""
        self._closed = False
        self._before_unmapping: list[Callable[[], None]] = []

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

        slot_bytes: rounded up to whole pages of 4,096 bytes.
        directory: a memory file system to take the memory from (/dev/shm, a hugetlbfs mount); None
            for anonymous memory, which no `--shm-size` limits.
        huge_pages: take anonymous memory from the system's pool of 2 MiB pages.

        Raises:
            ConfigError: it does not fit; says how much is available and what to change.
        """
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(
                f"a slab of {slots} slots of {slot_bytes} bytes; both must be positive"
            )
        slot_bytes = (slot_bytes + PAGE_BYTES - 1) & -PAGE_BYTES
        nbytes = slots * slot_bytes
        if not huge_pages:
            _check_memory(nbytes, directory)
        fd = _memory_file(directory, huge_pages)
        try:
            unit = _HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
            if directory:
                unit = os.fstatvfs(fd).f_bsize  # a hugetlbfs mount's is its huge page
            size = -(-nbytes // unit) * unit
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
        """Map the slab behind a file descriptor received from its owner; `fd` is closed on failure.

        Raises ConfigError when the file is not as large as `slots` and `slot_bytes` say: touching
        what lies past its end would kill this process.
        """
        try:
            size = os.fstat(fd).st_size
            if slots < 1 or slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
                raise ConfigError(f"a slab of {slots} slots of {slot_bytes} bytes cannot be")
            if size < slots * slot_bytes:
                raise ConfigError(
                    f"a slab file of {size} bytes; {slots} x {slot_bytes} were announced"
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

    def before_unmapping(self, call: Callable[[], None]) -> None:
        """Have `call` called by `close`, in its thread, while the memory is still mapped: for who
        gave the addresses to a device."""
        self._before_unmapping.append(call)

    def close(self) -> None:
        """Let go of the memory. Views still held elsewhere keep it mapped until they go."""
        if self._closed:
            return
        self._closed = True
        for call in self._before_unmapping:
            call()
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("slab still viewed at close; it is unmapped with its last view")
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"slab of {self.slots} x {format_bytes(self.slot_bytes)}"


def available_bytes() -> int:
    """Memory that can still be had: the least of what the system and our cgroup leave."""
    return min(_system_available(), _cgroup_available())


def _memory_file(directory: str | None, huge_pages: bool) -> int:
    """A file descriptor of an empty, nameless memory file."""
    if directory:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"slab directory {directory!r}: {error.strerror}; "
                "a writable memory file system such as /dev/shm is right"
            ) from None
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB if huge_pages else 0)
    return os.memfd_create("kvstore-slab", flags)


def _check_memory(nbytes: int, directory: str | None) -> None:
    """Refuse what cannot fit before touching it: the kernel would kill us half way through.

    Not for huge pages: they were set aside before, so neither the system's free memory nor our
    cgroup's limit of memory says anything of them. Too few of them fail cleanly when taken.
    """
    try:
        status = os.statvfs(directory) if directory else None
    except OSError as error:
        raise ConfigError(f"slab directory {directory!r}: {error.strerror}") from None
    # hugetlbfs gives the size of its pages.
    set_aside = status is not None and status.f_bsize >= _HUGE_PAGE_BYTES
    room = int(available_bytes() * MEMORY_HEADROOM)
    if nbytes > room and not set_aside:
        raise ConfigError(_too_large(nbytes, room, directory, False))
    if status is None:
        return
    left = status.f_bavail * status.f_frsize
    if nbytes > left:
        raise ConfigError(_too_large(nbytes, left, directory, False))


def _too_large(nbytes: int, room: int | None, directory: str | None, huge_pages: bool) -> str:
    """One line: what was asked, what there is, what to change."""
    have = "" if room is None else f"; {format_bytes(room)} are available"
    where = f" in {directory}" if directory else ""
    if huge_pages:
        how = "raise vm.nr_hugepages, or set l2.huge_pages = false"
    elif directory:
        how = f"lower l2.bytes (--l2), or raise the size of {directory} (docker: --shm-size)"
    else:
        how = (
            "lower l2.bytes (--l2), or raise the container's memory limit "
            "(docker: --memory; --shm-size when the slab is put into /dev/shm)"
        )
    return f"a slab of {format_bytes(nbytes)} does not fit{where}{have}; {how}"


def _populate(address: int, nbytes: int) -> None:
    """Fill in the page tables; a kernel without this call (before 5.14) does so at first touch."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) != 0:
        log.info("slab not populated: %s", os.strerror(ctypes.get_errno()))


def _lock(address: int, nbytes: int) -> bool:
    """mlock, as far as RLIMIT_MEMLOCK allows."""
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
    """What the memory limit of our cgroup (version 2 or 1) leaves; the sky where there is none."""
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
