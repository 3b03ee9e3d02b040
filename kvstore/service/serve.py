"""The sidecar's process: store, hot path and HTTP side together, from start to clean end."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn

from kvstore.config import Settings
from kvstore.errors import ConfigError
from kvstore.service.app import Service, build_app
from kvstore.service.auth import Tenants
from kvstore.service.hotpath import HotPath
from kvstore.service.sockets import BACKLOG, listen
from kvstore.store import Store
from kvstore.wire import build_store, check

log = logging.getLogger(__name__)

HTTP_STOP_S = 5
"""How long requests under way may take to end once the sidecar is told to stop."""


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Run the sidecar until SIGTERM or SIGINT. In the main thread.

    announce: called with one line once both sides take callers.

    Raises ConfigError: whatever keeps it from starting (socket or port in use, slab too large,
    an unknown name, a folder in use), before anything else is touched.
    """
    check(settings)
    # uvicorn takes these signals while it runs and raises them again when it has ended; before
    # and after, they must not end the process half way through.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as ending:
        listener = ending.enter_context(listen(settings.server.socket))
        ending.callback(Path(settings.server.socket).unlink, missing_ok=True)
        web = ending.enter_context(_bind(settings.server.host, settings.server.port))
        store = build_store(settings)
        ending.callback(_close_store, store, settings.limits.flush_ms / 1e3)
        tenants = Tenants(settings.server.tokens, settings.server.admin_token)
        hot = HotPath(
            store,
            listener,
            tenants=tenants,
            max_clients=settings.limits.clients,
            hello_s=settings.limits.hello_ms / 1e3,
            stats=lambda: stats(),
        )
        service = Service(
            store=store,
            tenants=tenants,
            stats=lambda: stats(),
            ready=lambda: not stop.is_set(),
            max_transfers=settings.limits.transfers,
            transfer_s=settings.limits.transfer_ms / 1e3,
            flush_s=settings.limits.flush_ms / 1e3,
        )
        ending.callback(service.threads.shutdown)

        def stats() -> dict[str, Any]:
            return {**store.stats(), "service": hot.snapshot(), "http": service.snapshot()}

        hot.start()
        ending.callback(hot.stop)
        # What lives until the end need not be looked through by every collection.
        gc.freeze()
        host, port = web.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"kvstore ready: socket {settings.server.socket}, http://{shown}:{port}, {store}")
        if not stop.is_set():
            _run_http(service, web)
        log.info("stopping")


def _run_http(service: Service, web: socket.socket) -> None:
    config = uvicorn.Config(
        build_app(service),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=HTTP_STOP_S,
    )
    uvicorn.Server(config).run(sockets=[web])


def _close_store(store: Store, flush_s: float) -> None:
    """Write what is queued, within a bound; close, which asserts that every slot came back."""
    if not store.flush(flush_s):
        log.warning("not everything was written within %g s", flush_s)
    store.close()


def _bind(host: str, port: int) -> socket.socket:
    """The HTTP side's listening socket. Raises ConfigError: in use, or no such address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror}; give --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; give another --port (0: any free)"
        ) from None
    return sock
