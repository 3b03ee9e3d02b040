"""The store behind a connector: the node's sidecar, or one inside the engine's process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.blocks.key import Namespace
from kvstore.config.settings import nearest
from kvstore.connectors.vllm.settings import StoreSettings
from kvstore.errors import ConfigError
from kvstore.interface import BlockStore
from kvstore.ipc.client import Client

if TYPE_CHECKING:
    from kvstore.store.store import Store


@dataclass(frozen=True)
class Opened:
    """A store's verbs, and how to be done with them."""

    store: BlockStore
    close: Callable[[], None]


class EmbeddedStores:
    """Stores of this process, by engine: vLLM makes the scheduler's side and the worker's side of
    one engine apart, in one process, and they must meet in one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, tuple[Store, int]] = {}

    def session(self, engine: str, arguments: Mapping[str, Any], namespace: Namespace) -> Opened:
        """A session of the engine's store, made by the first who asks, closed by the last."""
        with self._lock:
            store, holders = self._stores.get(engine) or (_make(arguments, namespace), 0)
            self._stores[engine] = (store, holders + 1)
        session = store.session(namespace)

        def close() -> None:
            session.close()
            self._drop(engine)

        return Opened(session, close)

    def _drop(self, engine: str) -> None:
        with self._lock:
            store, holders = self._stores.pop(engine)
            if holders > 1:
                self._stores[engine] = (store, holders - 1)
                return
        store.close()


EMBEDDED = EmbeddedStores()


def open_store(settings: StoreSettings, namespace: Namespace, *, engine: str, name: str) -> Opened:
    """The store that a user's settings name, bound to one namespace.

    An absent sidecar is no error: the engine goes on without until there is one.

    Raises:
        ConfigError: the sidecar refuses this client, or the store cannot be made.
    """
    if settings.embedded is not None:
        return EMBEDDED.session(engine, settings.embedded, namespace)
    client = Client(
        settings.socket,
        namespace,
        token=settings.token or None,
        name=name,
        route=settings.route,
        reply_limit_s=settings.reply_limit_ms / 1e3,
        wait_ready_s=settings.wait_ready_ms / 1e3,
    )
    return Opened(client, client.close)


def _make(arguments: Mapping[str, Any], namespace: Namespace) -> Store:
    known = inspect.signature(kvstore.open).parameters
    for argument in arguments:
        if argument not in known:
            raise ConfigError(f"unknown key 'embedded.{argument}'; {nearest(argument, known)}")
    return kvstore.open(**{"slot": namespace.block_bytes, **arguments})
