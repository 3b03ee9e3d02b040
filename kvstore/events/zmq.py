"""KV events over ZeroMQ, as vLLM sends them: three frames, `[topic, number, batch]`.

The number counts a publisher's batches, in 8 bytes, big-endian. A subscriber that lost batches can
request them (`replay`). The request is a number. The answer is every batch from that number on that
the publisher still has, and then the number -1.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import zmq

from kvstore.errors import ConfigError, FrameInvalid
from kvstore.events.codec import Batch, decode, encode
from kvstore.events.engine_index import EngineIndex

log = logging.getLogger(__name__)

MAX_QUEUED: Final = 10_000
"""Maximum batches in the socket of a subscriber or publisher; later ones are lost, and seen as a
gap."""
REPLAY_BATCHES: Final = 10_000
POLL_MS: Final = 200
PING_MS: Final = 5000
"""Interval of a subscriber's pings to an engine's host, and the longest wait for an answer."""
NUMBER_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class Subscriber:
    """Receives the events of engines, each at its endpoint, and applies them to an index.

    When an engine's connection ends, its blocks are dropped from the index.

    Raises:
        ConfigError: an endpoint is invalid.
    """

    def __init__(self, endpoints: Sequence[str], index: EngineIndex, *, topic: str = "") -> None:
        self._index = index
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._engines: dict[Any, str] = {}
        self._monitors: dict[Any, Any] = {}
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        try:
            for endpoint in endpoints:
                self._connect(endpoint, topic)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the sockets."""
        self._stopping.set()
        self._thread.join()
        self._close_sockets()

    def _connect(self, endpoint: str, topic: str) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        self._engines[socket] = endpoint
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitors[monitor] = socket
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen to KV events at {endpoint!r}: {error.strerror}; "
                "use an endpoint like 'tcp://127.0.0.1:5557'"
            ) from None
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for socket, _ in self._poller.poll(POLL_MS):
                if socket in self._monitors:
                    self._on_disconnect(socket)
                else:
                    self._receive(socket)

    def _on_disconnect(self, monitor: Any) -> None:
        """Read the last messages of a closed connection, and drop the engine's blocks."""
        monitor.recv_multipart()
        socket = self._monitors[monitor]
        for _ in range(MAX_QUEUED):
            if not socket.poll(0):
                break
            self._receive(socket)
        self._index.remove_engine(self._engines[socket])

    def _receive(self, socket: Any) -> None:
        engine = self._engines[socket]
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("KV events of %s: %s", engine, error)
            return
        try:
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                raise FrameInvalid("event message must have three frames: topic, number, batch")
            self._index.apply(engine, int.from_bytes(frames[1], "big"), decode(frames[2]))
        except FrameInvalid as error:
            if engine not in self._warned:
                self._warned.add(engine)
                log.warning("KV events of %s: invalid message dropped: %s", engine, error)
        except Exception:
            # An error in one message must not end the subscriber.
            log.exception(
                "KV events of %s: internal error; its blocks are dropped from the index", engine
            )
            self._index.remove_engine(engine)

    def _close_sockets(self) -> None:
        for monitor, socket in self._monitors.items():
            socket.disable_monitor()
            monitor.close(linger=0)
        for socket in self._engines:
            socket.close()
        self._context.term()


class Publisher:
    """Publishes batches at an endpoint. Call `publish` from one thread only.

    `publish` never waits, so a slow subscriber loses batches when its queue is full.

    replay: a second endpoint that answers requests for lost batches; "": none.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, *, topic: str = "", replay: str = "") -> None:
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._number = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self.endpoint = _bind(self._socket, endpoint)
            self.replay_endpoint = ""
            if replay:
                router = self._context.socket(zmq.ROUTER)
                self.replay_endpoint = _bind(router, replay)
                self._thread = threading.Thread(
                    target=self._run_replay, args=(router,), name="kv-events-replay", daemon=True
                )
                self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, batch: Batch) -> None:
        """Send a batch."""
        payload = encode(batch)
        number = self._number.to_bytes(NUMBER_BYTES, "big")
        self._kept.append((self._number, payload))
        self._number += 1
        with suppress(zmq.Again):
            self._socket.send_multipart([self._topic, number, payload], zmq.NOBLOCK)

    def close(self) -> None:
        """End the threads and the sockets."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def _run_replay(self, router: Any) -> None:
        """The thread that answers replay requests."""
        while not self._stopping.is_set():
            if not router.poll(POLL_MS):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                continue
            first = int.from_bytes(frames[2], "big")
            for number, payload in list(self._kept):
                if number >= first:
                    head = [frames[0], b"", self._topic, number.to_bytes(NUMBER_BYTES, "big")]
                    router.send_multipart([*head, payload])
            router.send_multipart([frames[0], b"", self._topic, END_OF_REPLAY, b""])
        router.close(linger=0)


def _bind(socket: Any, endpoint: str) -> str:
    """Bind a socket. Returns its endpoint, in which a port 0 is replaced by the actual port."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot publish KV events at {endpoint!r}: {error.strerror}; "
            "use an endpoint like 'tcp://*:5557'"
        ) from None
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\x00"))
