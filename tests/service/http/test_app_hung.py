"""The HTTP server over a tier that hangs: bounded, answered in time, blocks no other calls."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from fastapi import HTTPException
from sidecar_rig import LIMIT_S, NAMESPACE, SLOT_BYTES, SLOTS, content, hashes_of, put, wait_until

from kvstore.blocks import frame
from kvstore.service.access.auth import Tenants
from kvstore.service.http.admin_routes import add_admin_routes
from kvstore.service.http.app import MAX_ADMIN_CALLS, MAX_CONTAINS_CALLS, Service, build_app
from kvstore.service.http.call_limits import Bulkhead, result_of
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.faults import Fault, FaultyTier, always
from kvstore.tiers.memory import MemoryTier

TRANSFERS = 3
BELOW, ABOVE = hashes_of("below", 1)[0], hashes_of("above", 1)[0]
"""A block in the tier only, and one in L2."""
ASKED = {"namespace": NAMESPACE.digest, "hashes": [BELOW.hex()]}


class Side:
    """A store over a faulty tier, with its HTTP server, in this process."""

    def __init__(self, transfer_s: float) -> None:
        self.tier = FaultyTier(MemoryTier(64 << 20))
        slab = Slab.create(SLOTS, SLOT_BYTES)
        self.store = Store(slab, [self.tier], codecs={self.tier.name: "none"})
        session = self.store.session(NAMESPACE)
        put(session, [BELOW])
        assert self.store.flush()
        self.store.clear("l2")
        put(session, [ABOVE])
        assert self.store.flush()
        self.service = Service(
            store=self.store,
            tenants=Tenants({}),
            stats=lambda: {"http": self.service.snapshot()},
            ready=lambda: True,
            max_transfers=TRANSFERS,
            transfer_timeout_s=transfer_s,
            flush_timeout_s=LIMIT_S,
        )
        app = build_app(self.service)
        add_admin_routes(app, self.service)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server has started")
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        self._callers = ThreadPoolExecutor(16)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = self.connect()
        data = json.dumps(body).encode() if body is not None else None
        connection.request(method, path, body=data)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        is_json = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(text) if is_json else text

    def get(self, name: bytes) -> tuple[int, Any]:
        return self.call("GET", f"/v1/blocks/{NAMESPACE.digest}/{name.hex()}")

    def begin(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._callers.submit(function, *args)

    def taken(self) -> int:
        return self.service.transfers.in_use

    def close(self) -> None:
        self.tier.release()
        self._callers.shutdown()
        self._server.should_exit = True
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.service.close()
        self.store.close()


@pytest.fixture
def patient() -> Iterator[Side]:
    """A server with timeouts longer than the test."""
    made = Side(4 * LIMIT_S)
    yield made
    made.close()


@pytest.fixture
def brisk() -> Iterator[Side]:
    made = Side(0.2)
    yield made
    made.close()


def bytes_of(answer: tuple[int, Any]) -> bytes:
    """The block in the frame of a response."""
    status, whole = answer
    assert status == 200, whole
    return bytes(whole[frame.HEADER_BYTES :][:SLOT_BYTES])


def test_hung_reads_do_not_block_l2_and_administration(patient: Side) -> None:
    patient.tier.schedule = always(Fault.HUNG, "read", "contains")
    reads = [patient.begin(patient.get, BELOW) for _ in range(TRANSFERS - 1)]
    asks = [
        patient.begin(patient.call, "POST", "/v1/contains", ASKED)
        for _ in range(MAX_CONTAINS_CALLS)
    ]
    assert patient.tier.wait_hung(len(reads) + len(asks), LIMIT_S)
    assert patient.get(BELOW)[0] == 503
    assert patient.call("POST", "/v1/contains", ASKED)[0] == 503
    assert bytes_of(patient.get(ABOVE)) == content(ABOVE)
    assert patient.call("POST", "/v1/flush") == (200, {"flushed": True})
    assert patient.call("POST", "/v1/clear?tier=l2") == (200, {"cleared": "l2"})
    counts = patient.service.snapshot()
    del counts["requests"]
    assert counts == {
        "transfers": TRANSFERS - 1,
        "transfers_rejected": 1,
        "contains_rejected": 1,
    }
    patient.tier.release()
    for read in reads:
        assert bytes_of(read.result(LIMIT_S)) == content(BELOW)
    for ask in asks:
        assert ask.result(LIMIT_S)[1]["contains"] == [True]
    assert patient.call("POST", "/v1/contains", ASKED)[0] == 200
    wait_until(lambda: patient.taken() == 0, "all buffers are back")


def test_a_hung_warm_request_does_not_block_administration(patient: Side) -> None:
    assert patient.call("POST", "/v1/clear?tier=l2") == (200, {"cleared": "l2"})
    patient.tier.schedule = always(Fault.HUNG, "read")
    warm = patient.begin(patient.call, "POST", "/v1/warm", {"fraction": 0.5})
    assert patient.tier.wait_hung(1, LIMIT_S)
    assert patient.call("POST", "/v1/warm", {"fraction": 0.5})[0] == 503
    assert patient.call("POST", "/v1/flush") == (200, {"flushed": True})
    assert patient.call("POST", "/v1/clear?tier=l2") == (200, {"cleared": "l2"})
    patient.tier.release()
    assert warm.result(LIMIT_S) == (200, {"warmed": 2})


def test_a_hung_read_is_answered_in_time_and_keeps_its_buffer(brisk: Side) -> None:
    brisk.tier.schedule = always(Fault.HUNG, "read", "contains")
    status, answer = brisk.get(BELOW)
    assert (status, set(answer)) == (504, {"error"})
    assert brisk.taken() == 1, "the call may still write into it"
    for _ in range(2 * TRANSFERS):
        assert bytes_of(brisk.get(ABOVE)) == content(ABOVE)
    assert brisk.call("POST", "/v1/contains", ASKED)[0] == 504
    brisk.tier.release()
    wait_until(lambda: brisk.taken() == 0, "the buffer is back")
    assert bytes_of(brisk.get(BELOW)) == content(BELOW)
    assert brisk.call("POST", "/v1/contains", ASKED)[0] == 200


def test_places_of_hung_requests_are_released_with_the_calls(brisk: Side) -> None:
    brisk.tier.schedule = always(Fault.HUNG, "read", "contains")
    for _ in range(TRANSFERS - 1):
        assert brisk.get(BELOW)[0] == 504
    for _ in range(MAX_CONTAINS_CALLS):
        assert brisk.call("POST", "/v1/contains", ASKED)[0] == 504
    assert brisk.get(BELOW)[0] == 503
    assert brisk.call("POST", "/v1/contains", ASKED)[0] == 503
    brisk.tier.schedule = None
    brisk.tier.release()
    wait_until(lambda: brisk.call("POST", "/v1/contains", ASKED)[0] == 200, "a place")
    wait_until(lambda: brisk.get(BELOW)[0] == 200, "a buffer")


def test_a_contains_request_takes_its_place_before_its_body(patient: Side) -> None:
    """Otherwise every connection could have a body in memory."""
    halves = []
    for _ in range(MAX_CONTAINS_CALLS):
        connection = patient.connect()
        connection.putrequest("POST", "/v1/contains")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        connection.send(b"{")
        halves.append(connection)
    wait_until(lambda: patient.call("POST", "/v1/contains", ASKED)[0] == 503, "no place is left")
    halves[0].close()  # closed before the end
    wait_until(lambda: patient.call("POST", "/v1/contains", ASKED)[0] == 200, "a place is free")
    for connection in halves:
        connection.close()


def test_a_contains_request_without_its_body_is_aborted(brisk: Side) -> None:
    for _ in range(MAX_CONTAINS_CALLS + 1):
        connection = brisk.connect()
        connection.putrequest("POST", "/v1/contains")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        assert connection.getresponse().status == 408
        connection.close()


def test_a_bulkhead_keeps_the_places_of_calls_without_a_waiter() -> None:
    go = threading.Event()

    async def run() -> None:
        bulkhead = Bulkhead("calls", MAX_ADMIN_CALLS)
        for _ in range(MAX_ADMIN_CALLS):
            bulkhead.acquire()
            with pytest.raises(HTTPException) as late:
                await result_of(bulkhead.start(go.wait, LIMIT_S), 0.01)
            assert late.value.status_code == 504
        with pytest.raises(HTTPException) as full:
            bulkhead.acquire()
        assert (full.value.status_code, bulkhead.rejected) == (503, 1)
        assert bulkhead.join(time.monotonic()) == MAX_ADMIN_CALLS, "the end does not wait for them"
        go.set()
        while bulkhead.join(time.monotonic() + LIMIT_S):
            pass
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bulkhead.acquire()
        bulkhead.release()
        bulkhead.acquire()
        with pytest.raises(ZeroDivisionError):
            await result_of(bulkhead.start(lambda: 1 // 0), LIMIT_S)
        with pytest.raises(AssertionError, match="twice"):
            bulkhead.release()

    asyncio.run(run())
