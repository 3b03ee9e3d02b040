"""Opens the store of a connector: the node's sidecar, or a store in the engine's process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.config.renamed import refuse_key
from kvstore.config.settings import suggest
from kvstore.connectors.vllm.common.settings import StoreSettings
from kvstore.errors import ConfigError
from kvstore.forks import on_fork
from kvstore.interface import BlockStore
from kvstore.ipc.client import Client

if TYPE_CHECKING:
    from kvstore.store.store import Store


@dataclass(frozen=True)
class StoreHandle:
    """A store and the function that closes it."""

    store: BlockStore
    close: Callable[[], None]


class EmbeddedStores:
    """Stores of this process, by engine. vLLM creates the scheduler's side and the worker's side of
    an engine separately in one process, and both must use the same store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, tuple[Store, int]] = {}
        on_fork(self._let_go)

    def session(
        self, engine: str, arguments: Mapping[str, Any], namespace: Namespace
    ) -> StoreHandle:
        """Connect to the engine's store. The first session opens it, the last one closes it."""
        with self._lock:
            store, sessions = self._stores.get(engine) or (_open_embedded(arguments, namespace), 0)
            self._stores[engine] = (store, sessions + 1)
        session = store.session(namespace)

        def close() -> None:
            session.close()
            self._close_session(engine, store)

        return StoreHandle(session, close)

    def _close_session(self, engine: str, store: Store) -> None:
        with self._lock:
            opened, sessions = self._stores.get(engine, (None, 0))
            if opened is not store:
                return  # inherited by a forked child: the parent closes it
            del self._stores[engine]
            if sessions > 1:
                self._stores[engine] = (store, sessions - 1)
                return
        store.close()

    def _let_go(self) -> None:
        """In a forked child: forget the parent's stores, so that an engine here opens its own."""
        self._lock, self._stores = threading.Lock(), {}


EMBEDDED = EmbeddedStores()


def open_store(
    settings: StoreSettings, namespace: Namespace, *, engine: str, name: str
) -> StoreHandle:
    """Open the store of a user's settings, bound to one namespace.

    A missing sidecar is not an error: the engine continues without it until it appears.

    Raises:
        ConfigError: the sidecar rejects this client, or the store cannot be opened.
    """
    if settings.embedded is not None:
        return EMBEDDED.session(engine, settings.embedded, namespace)
    client = Client(
        settings.socket,
        namespace,
        auth_token=settings.auth_token or None,
        name=name,
        traffic_label=settings.traffic_label,
        response_timeout_s=settings.response_timeout / 1e3,
        connect_timeout_s=settings.store_connect_timeout / 1e3,
    )
    return StoreHandle(client, client.close)


def _open_embedded(arguments: Mapping[str, Any], namespace: Namespace) -> Store:
    known = inspect.signature(kvstore.open).parameters
    for argument in arguments:
        refuse_key(f"embedded.{argument}")
        if argument not in known:
            raise ConfigError(f"unknown key 'embedded.{argument}'; {suggest(argument, known)}")
    return kvstore.open(**{"slot_bytes": namespace.block_bytes, **arguments})
