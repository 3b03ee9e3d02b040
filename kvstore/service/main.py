"""The sidecar process: runs the store, the socket server and the HTTP server."""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import uvicorn

from kvstore.config.settings import ServerSettings, Settings
from kvstore.errors import ConfigError
from kvstore.events.engine_index import EngineIndex
from kvstore.events.publisher import L2EventPublisher
from kvstore.service.access.auth import Tenants
from kvstore.service.http.admin_routes import add_admin_routes
from kvstore.service.http.app import Service, build_app
from kvstore.service.http.dashboard import Views, add_dashboard
from kvstore.service.http.engines import add_engines
from kvstore.service.http.listing import add_listing
from kvstore.service.http.prefix_index import PrefixIndex
from kvstore.service.ipc.socket_server import SocketServer
from kvstore.service.ipc.sockets import BACKLOG, listen
from kvstore.service.reload import Reloader, add_reload
from kvstore.store.assembly import build_store, check_settings, prepare_reload
from kvstore.store.store import Store
from kvstore.telemetry import logs
from kvstore.telemetry.history import History
from kvstore.telemetry.tracing import open_tracer

log = logging.getLogger(__name__)

HTTP_STOP_S = 5
"""Longest time for running requests to end after the sidecar is told to stop."""


def serve(
    settings: Settings,
    announce: Callable[[str], None],
    reread: Callable[[], Settings] | None = None,
) -> None:
    """Run the sidecar until SIGTERM or SIGINT. In the main thread.

    announce: called with one line once both servers accept clients, and after a reload by SIGHUP.
    reread: reads the configuration again for a reload; None without a configuration file.

    Raises ConfigError: the sidecar cannot start (socket or port in use, slab too large, an unknown
    name, a folder in use). Nothing else has been changed then.
    """
    check_settings(settings)
    logs.configure(settings.log)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ExitStack() as ending:
        listener = ending.enter_context(listen(settings.server.socket))
        web = ending.enter_context(_bind(settings.server.host, settings.server.port))
        tracer = open_tracer(settings.trace, "kvstore sidecar")
        if tracer is not None:
            ending.callback(tracer.close)
        record = tracer.record if tracer is not None else None
        store = build_store(settings, record)
        ending.callback(
            lambda: _close_store(store, reloader.settings.limits.shutdown_drain_timeout / 1e3)
        )
        prefixes = PrefixIndex()
        tenants = Tenants(settings.server.auth_tokens, settings.server.admin_auth_token)
        socket_server = SocketServer(
            store,
            listener,
            tenants=tenants,
            max_clients=settings.limits.max_clients,
            handshake_timeout_s=settings.limits.handshake_timeout / 1e3,
            stats=lambda: stats(),
            on_lookup=prefixes.record_lookup,
            record=record,
        )
        service = Service(
            store=store,
            tenants=tenants,
            stats=lambda: stats(),
            ready=lambda: socket_server.owns_file and not (stop.requested or server.should_exit),
            max_transfers=settings.limits.max_http_transfers,
            transfer_timeout_s=settings.limits.http_transfer_timeout / 1e3,
            flush_timeout_s=settings.limits.shutdown_drain_timeout / 1e3,
            hash=settings.hash,
            tracer=tracer,
        )
        ending.callback(service.close)
        apply = partial(_apply_settings, store, socket_server, service)
        reloader = Reloader(settings, reread, apply, announce)
        reloader.start()
        ending.callback(reloader.close)
        signal.signal(signal.SIGHUP, reloader.on_signal)

        engines = _listen_to_engines(settings.server.kv_events, ending)
        l2_events = _publish_l2(settings.server, store, ending)

        def stats() -> dict[str, Any]:
            own = {**store.stats(), "service": socket_server.snapshot(), "http": service.snapshot()}
            own["reloads"] = reloader.snapshot()
            own |= {} if engines is None else {"engines": engines.snapshot()}
            return own if l2_events is None else {**own, "l2_events": l2_events.snapshot()}

        history = History(lambda: stats(), prefixes.process_lookups)
        ending.callback(history.close)
        server = _http_server(service, engines, reloader, Views(store, stats, prefixes, history))
        history.start()
        socket_server.start()
        ending.callback(socket_server.stop)
        # These objects live until the end, so that the garbage collector need not scan them.
        gc.freeze()
        host, port = web.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"kvstore ready: socket {settings.server.socket}, http://{shown}:{port}, {store}")
        stop.attach(server)
        server.run(sockets=[web])
        log.info("stopping")


class Stop:
    """The handler of SIGTERM and SIGINT: stops the HTTP server, now or once it exists.

    While uvicorn runs it has its own handlers, and raises the signal again at its end. Before and
    after that, these signals must not end the process abruptly.
    """

    def __init__(self) -> None:
        self.requested = False
        self._server: uvicorn.Server | None = None

    def __call__(self, number: int, frame: object) -> None:
        self.requested = True
        if self._server is not None:
            self._server.should_exit = True

    def attach(self, server: uvicorn.Server) -> None:
        """Stop this server at a signal, or now if a signal has already come."""
        self._server = server
        if self.requested:
            server.should_exit = True


def _listen_to_engines(endpoints: Sequence[str], ending: ExitStack) -> EngineIndex | None:
    """An index of the blocks of the engines at these endpoints; None without endpoints.

    Raises ConfigError: an endpoint is invalid, or pyzmq is not installed.
    """
    if not endpoints:
        return None
    index = EngineIndex()
    ending.callback(_event_sockets("server.kv_events").Subscriber(endpoints, index).close)
    return index


def _publish_l2(server: ServerSettings, store: Store, ending: ExitStack) -> L2EventPublisher | None:
    """A publisher of L2's changes; None if not configured.

    Raises ConfigError: an endpoint cannot be bound, or pyzmq is not installed.
    """
    if not server.kv_events_publish:
        if server.kv_events_replay:
            raise ConfigError("server.kv_events_replay requires server.kv_events_publish")
        return None
    sockets = _event_sockets("server.kv_events_publish")
    publisher = sockets.Publisher(server.kv_events_publish, replay=server.kv_events_replay)
    ending.callback(publisher.close)
    l2_events = L2EventPublisher(store.manager.events, store.manager.lock, publisher)
    ending.callback(l2_events.close)
    return l2_events


def _event_sockets(setting: str) -> Any:
    try:
        return importlib.import_module("kvstore.events.zmq")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{setting} requires pyzmq: pip install 'kvstore-offload[events]'"
        ) from None


def _apply_settings(
    store: Store, socket_server: SocketServer, service: Service, settings: Settings
) -> Callable[[], None]:
    """A function that applies the reloadable settings. Raises ConfigError: they are invalid."""
    logs.check(settings.log)
    set_store = prepare_reload(store, settings)
    server, limits = settings.server, settings.limits

    def apply() -> None:
        logs.configure(settings.log)
        set_store()
        service.tenants.replace(server.auth_tokens, server.admin_auth_token)
        socket_server.set_limits(limits.max_clients, limits.handshake_timeout / 1e3)
        service.transfer_timeout_s, service.flush_timeout_s = (
            limits.http_transfer_timeout / 1e3,
            limits.shutdown_drain_timeout / 1e3,
        )

    return apply


def _http_server(
    service: Service, engines: EngineIndex | None, reloader: Reloader, views: Views
) -> uvicorn.Server:
    app = build_app(service)
    add_admin_routes(app, service)
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
    """Write queued blocks within `flush_s`, then close. Close asserts that all slots are free."""
    if not store.flush(flush_s):
        log.warning("shutdown: not all queued blocks were written within %g s", flush_s)
    store.close()


def _bind(host: str, port: int) -> socket.socket:
    """The HTTP server's listening socket. Raises ConfigError: in use, or an invalid address."""
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
