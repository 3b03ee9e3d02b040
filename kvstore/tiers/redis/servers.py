"""Which server holds a name: one server, the master that sentinels know, or a node of a cluster.

Connections, authentication, TLS, the slots of a cluster and the discovery of a master are
redis-py's. Nothing is connected before the first call, so a store starts while its server is away.
"""

from __future__ import annotations

import abc
import threading
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as ForeignConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from kvstore.tiers.redis.address import Address
from kvstore.tiers.redis.faults import FOREIGN

NODES_MAX: Final = 1024
"""Nodes of a cluster that connections are kept to."""


class Servers(abc.ABC):
    """Pools of connections by name. Thread-safe; raises redis-py's exceptions."""

    clustered = False

    def __init__(self, address: Address) -> None:
        self.address = address

    @abc.abstractmethod
    def pool_of(self, name: bytes) -> ConnectionPool:
        """Connections to the server that holds `name`, as far as is known."""

    @abc.abstractmethod
    def pools(self) -> list[ConnectionPool]:
        """Connections to every server that holds names of its own."""

    def look_again(self, *, wait: bool) -> None:  # noqa: B027 - one server is where it is
        """What was known of who holds what may be wrong: find out anew. wait: until it is known."""

    def __str__(self) -> str:
        return str(self.address)

    def follow(self, *words: str | bytes | int) -> Any:
        """A command (its second word a name) by redis-py's own client, which follows a cluster's
        redirects; slower, and it copies."""
        raise NotImplementedError("only a cluster redirects")

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for pool in self._open_pools():
            pool.disconnect(inuse_connections=False)

    @abc.abstractmethod
    def _open_pools(self) -> list[ConnectionPool]:
        """The pools there are, without asking anybody."""


class OneServer(Servers):
    """A server at a host and port, or at a Unix socket."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._pool = _pool(address)

    def pool_of(self, name: bytes) -> ConnectionPool:
        return self._pool

    def pools(self) -> list[ConnectionPool]:
        return [self._pool]

    def _open_pools(self) -> list[ConnectionPool]:
        return [self._pool]


class SentinelServers(OneServer):
    """The master of a service; its pool asks the sentinels whenever it connects."""

    def __init__(self, address: Address) -> None:
        Servers.__init__(self, address)
        tls = {"ssl": True} if address.tls else {}
        sentinel = Sentinel(
            list(address.hosts), sentinel_kwargs={**_plain(address.sentinel_options), **tls}
        )
        self._pool = SentinelConnectionPool(
            address.service, sentinel, retry=_no_retry(), **address.options, **tls
        )

    def look_again(self, *, wait: bool) -> None:
        self._pool.disconnect(inuse_connections=False)


class ClusterServers(Servers):
    """The nodes of a cluster. redis-py's client knows the slots; the connections that frames go
    over are our own, so that a change of its tables closes none under a transfer."""

    clustered = True

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._client: RedisCluster | None = None
        self._pools: dict[tuple[str, int], ConnectionPool] = {}

    def pool_of(self, name: bytes) -> ConnectionPool:
        client = self._known()
        node = client.nodes_manager.get_node_from_slot(client.keyslot(name))
        return self._pool_at(node)

    def pools(self) -> list[ConnectionPool]:
        return [self._pool_at(node) for node in self._known().get_primaries()]

    def look_again(self, *, wait: bool) -> None:
        """One caller asks the cluster; those who come meanwhile go on with what is known."""
        client = self._client
        if client is None or not self._making.acquire(blocking=False):
            return
        if wait:
            self._ask_again(client)
        else:
            name = "kvstore-redis-cluster"
            threading.Thread(target=self._ask_again, args=(client,), name=name, daemon=True).start()

    def _ask_again(self, client: RedisCluster) -> None:
        """Read the map of slots anew; `_making` is held, and given back."""
        try:
            client.nodes_manager.initialize()
        except FOREIGN:
            # None of the nodes it knows answers: begin anew with those of the configuration.
            self._client = None
        finally:
            self._making.release()

    def follow(self, *words: str | bytes | int) -> Any:
        return self._known().execute_command(*words)

    def close(self) -> None:
        super().close()
        client = self._client
        if client is not None:
            client.close()

    def _open_pools(self) -> list[ConnectionPool]:
        with self._lock:
            return list(self._pools.values())

    def _known(self) -> RedisCluster:
        """The client, made when it is first needed: making it asks the cluster for its slots."""
        client = self._client
        if client is not None:
            return client
        if not self._making.acquire(timeout=self.address.options["socket_timeout"]):
            raise ForeignConnectionError("its nodes are still being looked for")
        try:
            client = self._client = self._client or self._make()
        finally:
            self._making.release()
        return client

    def _make(self) -> RedisCluster:
        options = {**self.address.options, **({"ssl": True} if self.address.tls else {})}
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self.address.hosts],
            require_full_coverage=False,
            retry=Retry(NoBackoff(), 1),
            **options,
        )

    def _pool_at(self, node: ClusterNode) -> ConnectionPool:
        place = (node.host, node.port)
        with self._lock:
            pool = self._pools.get(place)
            if pool is None:
                if len(self._pools) >= NODES_MAX:
                    # Nodes that went long ago; connections in use close when they are given back.
                    for gone in self._pools.values():
                        gone.disconnect(inuse_connections=False)
                    self._pools.clear()
                pool = self._pools[place] = _pool(self.address, *place)
            return pool


def servers_at(address: Address) -> Servers:
    """The servers of an address; nothing is connected yet."""
    if address.cluster:
        return ClusterServers(address)
    return SentinelServers(address) if address.service else OneServer(address)


def _pool(address: Address, host: str = "", port: int = 0) -> ConnectionPool:
    """Connections to one server; to the address' own when no other is named. Unbounded: the tier
    bounds how many are used at once."""
    kind: type = Connection
    place: dict[str, Any] = {}
    if address.socket:
        kind, place = UnixDomainSocketConnection, {"path": address.socket}
    else:
        kind = SSLConnection if address.tls else Connection
        place = dict(zip(("host", "port"), (host, port) if host else address.hosts[0], strict=True))
    return ConnectionPool(kind, retry=_no_retry(), **address.options, **place)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """For a `Redis` of a sentinel, which takes its retry by itself."""
    return {**options, "retry": _no_retry()}


def _no_retry() -> Retry:
    """Faults are for the breaker and the caller to judge; a tier does not retry by itself."""
    return Retry(NoBackoff(), 0)
