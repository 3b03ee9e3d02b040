"""The sidecar's process: store, hot path and HTTP side together, from start to clean end."""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from kvstore.config.settings import ServerSettings, Settings
from kvstore.errors import ConfigError
from kvstore.events.engine_index import EngineIndex
from kvstore.events.publisher import L2Events
from kvstore.service.auth import Tenants
from kvstore.service.http.admin_routes import add_care
from kvstore.service.http.app import Service, build_app
from kvstore.service.http.dashboard import Views, add_dashboard
from kvstore.service.http.engines import add_engines
from kvstore.service.http.listing import add_listing
from kvstore.service.ipc.socket_server import HotPath
from kvstore.service.ipc.sockets import BACKLOG, listen
from kvstore.service.prefix_index import PrefixIndex
from kvstore.service.reload import Reloader, add_reload
from kvstore.store.assembly import build_store, check, retune
from kvstore.store.store import Store
from kvstore.telemetry import logs
from kvstore.telemetry.history import History
from kvstore.telemetry.tracing import open_tracer

log = logging.getLogger(__name__)

HTTP_STOP_S = 5
"""How long requests under way may take to end once the sidecar is told to stop."""


def serve(
    settings: Settings,
    announce: Callable[[str], None],
    reread: Callable[[], Settings] | None = None,
) -> None:
    """Run the sidecar until SIGTERM or SIGINT. In the main thread.

    announce: called with one line once both sides take callers, and after each reload by SIGHUP.
    reread: reads the configuration anew, for a reload; None where there is no file.

    Raises ConfigError: whatever keeps it from starting (socket or port in use, slab too large,
    an unknown name, a folder in use), before anything else is touched.
    """
    check(settings)
    logs.configure(settings.log)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ExitStack() as ending:
        listener = ending.enter_context(listen(settings.server.socket))
        ending.callback(Path(settings.server.socket).unlink, missing_ok=True)
        web = ending.enter_context(_bind(settings.server.host, settings.server.port))
        tracer = open_tracer(settings.trace, "kvstore sidecar")
        if tracer is not None:
            ending.callback(tracer.close)
        record = tracer.record if tracer is not None else None
        store = build_store(settings, record)
        ending.callback(lambda: _close_store(store, reloader.settings.limits.flush_ms / 1e3))
        prefixes = PrefixIndex()
        tenants = Tenants(settings.server.tokens, settings.server.admin_token)
        hot = HotPath(
            store,
            listener,
            tenants=tenants,
            max_clients=settings.limits.clients,
            hello_s=settings.limits.hello_ms / 1e3,
            stats=lambda: stats(),
            asked=prefixes.asked,
            record=record,
        )
        service = Service(
            store=store,
            tenants=tenants,
            stats=lambda: stats(),
            ready=lambda: not (stop.told or server.should_exit),
            max_transfers=settings.limits.transfers,
            transfer_s=settings.limits.transfer_ms / 1e3,
            flush_s=settings.limits.flush_ms / 1e3,
            hash=settings.hash,
            tracer=tracer,
        )
        ending.callback(service.close)
        reloader = Reloader(settings, reread, partial(_retune, store, hot, service), announce)
        reloader.start()
        ending.callback(reloader.close)
        signal.signal(signal.SIGHUP, reloader.told)

        engines = _listen_to_engines(settings.server.kv_events, ending)
        told = _publish_l2(settings.server, store, ending)

        def stats() -> dict[str, Any]:
            own = {**store.stats(), "service": hot.snapshot(), "http": service.snapshot()}
            own["reloads"] = reloader.snapshot()
            own |= {} if engines is None else {"engines": engines.snapshot()}
            return own if told is None else {**own, "l2_events": told.snapshot()}

        history = History(lambda: stats(), prefixes.digest)
        ending.callback(history.close)
        server = _http_server(service, engines, reloader, Views(store, stats, prefixes, history))
        history.start()
        hot.start()
        ending.callback(hot.stop)
        # What lives until the end need not be looked through by every collection.
        gc.freeze()
        host, port = web.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"kvstore ready: socket {settings.server.socket}, http://{shown}:{port}, {store}")
        stop.end(server)
        server.run(sockets=[web])
        log.info("stopping")


class Stop:
    """The handler of SIGTERM and SIGINT: tells the HTTP server to end, now or once it is there.

    uvicorn has handlers of its own while it runs, and raises the signal again when it has ended.
    Outside of that these signals must not end the process half way through.
    """

    def __init__(self) -> None:
        self.told = False
        self._server: uvicorn.Server | None = None

    def __call__(self, number: int, frame: object) -> None:
        self.told = True
        if self._server is not None:
            self._server.should_exit = True

    def end(self, server: uvicorn.Server) -> None:
        """End this one when told to, or if that has happened."""
        self._server = server
        if self.told:
            server.should_exit = True


def _listen_to_engines(endpoints: Sequence[str], ending: ExitStack) -> EngineIndex | None:
    """An index of what the engines at these endpoints hold; None where there are none.

    Raises ConfigError: an endpoint that is none, or pyzmq is not installed.
    """
    if not endpoints:
        return None
    index = EngineIndex()
    ending.callback(_event_sockets("server.kv_events").Subscriber(endpoints, index).close)
    return index


def _publish_l2(server: ServerSettings, store: Store, ending: ExitStack) -> L2Events | None:
    """What publishes L2's changes; None where nobody wants it.

    Raises ConfigError: an endpoint that cannot be bound, or pyzmq is not installed.
    """
    if not server.kv_events_publish:
        if server.kv_events_replay:
            raise ConfigError("server.kv_events_replay without server.kv_events_publish")
        return None
    sockets = _event_sockets("server.kv_events_publish")
    publisher = sockets.Publisher(server.kv_events_publish, replay=server.kv_events_replay)
    ending.callback(publisher.close)
    told = L2Events(store.brain.changes, store.brain.lock, publisher)
    ending.callback(told.close)
    return told


def _event_sockets(setting: str) -> Any:
    try:
        return importlib.import_module("kvstore.events.zmq")
    except ModuleNotFoundError:
        raise ConfigError(f"{setting} needs pyzmq; pip install 'kvstore-offload[events]'") from None


def _retune(store: Store, hot: HotPath, service: Service, settings: Settings) -> Callable[[], None]:
    """What sets these settings, in all of `reload.RELOADS`. Raises ConfigError: they are wrong."""
    logs.check(settings.log)
    set_store = retune(store, settings)
    server, limits = settings.server, settings.limits

    def set_them() -> None:
        logs.configure(settings.log)
        set_store()
        service.tenants.replace(server.tokens, server.admin_token)
        hot.bound(limits.clients, limits.hello_ms / 1e3)
        service.transfer_s, service.flush_s = limits.transfer_ms / 1e3, limits.flush_ms / 1e3

    return set_them


def _http_server(
    service: Service, engines: EngineIndex | None, reloader: Reloader, views: Views
) -> uvicorn.Server:
    app = build_app(service)
    add_care(app, service)
    add_reload(app, service, reloader)
    add_dashboard(app, service, views)
    add_listing(app, service)
    if engines is not None:
        add_engines(app, service, engines)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=HTTP_STOP_S,
    )
    return uvicorn.Server(config)


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
