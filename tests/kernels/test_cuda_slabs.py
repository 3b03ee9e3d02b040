"""Registration of slabs with the driver, tested with a driver that records it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from kvstore.kernels.slabs import SLABS_MAX, SlabMap
from kvstore.shm.slab import Slab

SLOTS = 4
SLOT_BYTES = 64 << 10


class Driver:
    """The part of `cupy.cuda.runtime` that registers memory. It knows addresses and files.

    registered: host address to the inode of the memory registered there. A registration stays with
    its original pages, whatever is mapped at its address later.
    """

    class CUDARuntimeError(Exception):
        pass

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.failing = False

    def hostRegister(self, host: int, nbytes: int, flags: int) -> None:
        if self.failing or host in self.registered:
            raise self.CUDARuntimeError("cannot register")
        assert nbytes == SLOTS * SLOT_BYTES
        self.registered[host] = inode_at(host)

    def hostUnregister(self, host: int) -> None:
        if self.registered.pop(host, None) is None:
            raise self.CUDARuntimeError("not registered")

    def pointerGetAttributes(self, host: int) -> SimpleNamespace:
        return SimpleNamespace(devicePointer=host + (1 << 50))


def inode_at(address: int) -> int:
    """Return the inode of the file mapped at this address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split()
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= address < last:
                return int(inode)
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def slabs(driver: Driver) -> Iterator[SlabMap]:
    made = SlabMap(driver, nullcontext)
    yield made
    made.clear()
    assert driver.registered == {}


def slab() -> Slab:
    return Slab.create(SLOTS, SLOT_BYTES)


def at_the_place_of(old: Slab) -> Slab:
    """Close `old` and return another slab, mapped at the same address."""
    file = slab()
    fd = os.dup(file.fd)
    file.close()
    address = old.address
    old.close()
    new = Slab.attach(fd, SLOTS, SLOT_BYTES)
    if new.address != address:
        pytest.skip("the system mapped it at another address")
    return new


def test_a_new_slab_at_an_old_address_is_registered_again(driver: Driver, slabs: SlabMap) -> None:
    """As after a restart of the sidecar: same size, same address, other pages."""
    old = slab()
    slabs.add(old)
    assert driver.registered == {old.address: os.fstat(old.fd).st_ino}
    new = at_the_place_of(old)
    slabs.add(new)
    assert driver.registered == {new.address: os.fstat(new.fd).st_ino}
    slabs.add(new)  # Already registered.
    found = slabs.addresses([new.view(0), new.view(3)])
    assert found is not None
    assert found.device.tolist() == [new.address + (1 << 50) + slot * SLOT_BYTES for slot in (0, 3)]
    new.close()


def test_a_slab_without_notification_is_found_by_identity(driver: Driver, slabs: SlabMap) -> None:
    """Any `SlabView` can be mapped. One that does not notify of its end is found by its object."""

    class Silent:
        def __init__(self, inner: Slab) -> None:
            self.inner = inner
            self.slots, self.slot_bytes, self.view = inner.slots, inner.slot_bytes, inner.view

    old = slab()
    slabs.add(Silent(old))
    new = at_the_place_of(old)
    slabs.add(Silent(new))
    assert driver.registered == {new.address: os.fstat(new.fd).st_ino}
    slabs.clear()
    new.close()


def test_a_slab_is_unregistered_before_it_is_unmapped(driver: Driver, slabs: SlabMap) -> None:
    """A registration pins its pages: a lost sidecar's slab would stay in memory."""
    old, live = slab(), slab()
    slabs.add(old)
    slabs.add(live)
    seen: list[int] = []
    old.before_unmapping(lambda: seen.append(inode_at(old.address)))
    inode = os.fstat(old.fd).st_ino
    old.close()
    assert seen == [inode], "still mapped when notified"
    assert list(driver.registered) == [live.address]
    assert slabs.addresses([live.view(1)]) is not None
    live.close()
    assert driver.registered == {}


def test_slabs_beyond_the_limit_replace_the_oldest(driver: Driver, slabs: SlabMap) -> None:
    made = [slab() for _ in range(SLABS_MAX + 1)]
    for each in made:
        slabs.add(each)
    assert list(driver.registered) == [each.address for each in made[1:]]
    assert slabs.addresses([made[0].view(0)]) is None
    for each in made:
        each.close()


def test_a_slab_the_driver_rejects_is_left_out(driver: Driver, slabs: SlabMap) -> None:
    driver.failing = True
    rejected = slab()
    slabs.add(rejected)
    assert slabs.addresses([rejected.view(0)]) is None
    rejected.close()
