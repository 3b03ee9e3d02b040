"""The server of each name: a single server, the master of a Sentinel service, or a cluster node.

redis-py implements connections, authentication, TLS, cluster slots and master discovery. The first
call connects, so a store starts even if its server is unreachable.
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
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from kvstore.tiers.redis.address import Address
from kvstore.tiers.redis.faults import CALL_ERRORS

MAX_NODES: Final = 1024
"""Maximum number of cluster nodes with open connections."""


class Servers(abc.ABC):
    """Connection pools by key name. Thread-safe; raises redis-py's exceptions."""

    clustered = False

    def __init__(self, address: Address) -> None:
        self.address = address

    @abc.abstractmethod
    def pool_of(self, name: bytes) -> ConnectionPool:
        """The connection pool of the server that has `name`, by the known topology."""

    @abc.abstractmethod
    def pools(self) -> list[ConnectionPool]:
        """The connection pools of all servers, in a cluster of all primaries."""

    def refresh_topology(self, *, wait: bool) -> None:  # noqa: B027 - a single server has none
        """Query the topology again. wait: return after the query has ended."""

    def __str__(self) -> str:
        return str(self.address)

    def execute_following_redirects(self, *words: str | bytes | int) -> Any:
        """Run a command, whose second word is a name, with redis-py's cluster client.

        The client follows redirects, but is slower and copies values.
        """
        raise NotImplementedError("only a cluster redirects")

    def close(self) -> None:
        """Close the connections that are not in use."""
        for pool in self._open_pools():
            pool.disconnect(inuse_connections=False)

    @abc.abstractmethod
    def _open_pools(self) -> list[ConnectionPool]:
        """The existing pools; sends no request."""


class SingleServer(Servers):
    """A server at a host and port, or behind a Unix socket."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._pool = _create_pool(address)

    def pool_of(self, name: bytes) -> ConnectionPool:
        return self._pool

    def pools(self) -> list[ConnectionPool]:
        return [self._pool]

    def _open_pools(self) -> list[ConnectionPool]:
        return [self._pool]


class SentinelServers(SingleServer):
    """The master that sentinels monitor. Its pool queries the sentinels for each new connection."""

    def __init__(self, address: Address) -> None:
        Servers.__init__(self, address)
        tls = {"ssl": True} if address.tls else {}
        sentinel = Sentinel(
            list(address.hosts), sentinel_kwargs={**_without_retry(address.sentinel_options), **tls}
        )
        self._pool = SentinelConnectionPool(
            address.sentinel_master, sentinel, retry=_no_retry(), **address.options, **tls
        )

    def refresh_topology(self, *, wait: bool) -> None:
        self._pool.disconnect(inuse_connections=False)


class ClusterServers(Servers):
    """The nodes of a cluster.

    redis-py's cluster client has the slot map. Frames use separate connections, so a change of the
    slot map does not close the connection of a running transfer.
    """

    clustered = True

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._lock = threading.Lock()
        self._client_lock = threading.Lock()
        self._client: RedisCluster | None = None
        self._pools: dict[tuple[str, int], ConnectionPool] = {}

    def pool_of(self, name: bytes) -> ConnectionPool:
        client = self._connected_client()
        node = client.nodes_manager.get_node_from_slot(client.keyslot(name))
        return self._pool_at(node)

    def pools(self) -> list[ConnectionPool]:
        return [self._pool_at(node) for node in self._connected_client().get_primaries()]

    def refresh_topology(self, *, wait: bool) -> None:
        """Reload the slot map. A call during a running reload does nothing."""
        client = self._client
        if client is None or not self._client_lock.acquire(blocking=False):
            return
        if wait:
            self._reload_slots(client)
        else:
            name = "kvstore-redis-cluster"
            threading.Thread(
                target=self._reload_slots, args=(client,), name=name, daemon=True
            ).start()

    def _reload_slots(self, client: RedisCluster) -> None:
        """Reload the slot map. The caller has acquired `_client_lock`; this releases it."""
        try:
            client.nodes_manager.initialize()
        except CALL_ERRORS:
            # No known node responds: start again with the nodes in the configuration.
            self._client = None
        finally:
            self._client_lock.release()

    def execute_following_redirects(self, *words: str | bytes | int) -> Any:
        return self._connected_client().execute_command(*words)

    def close(self) -> None:
        super().close()
        client = self._client
        if client is not None:
            client.close()

    def _open_pools(self) -> list[ConnectionPool]:
        with self._lock:
            return list(self._pools.values())

    def _connected_client(self) -> RedisCluster:
        """The cluster client. The first call creates it, which queries the slot map."""
        client = self._client
        if client is not None:
            return client
        if not self._client_lock.acquire(timeout=self.address.options["socket_timeout"]):
            raise RedisConnectionError("another call is still querying the cluster's nodes")
        try:
            client = self._client = self._client or self._create_client()
        finally:
            self._client_lock.release()
        return client

    def _create_client(self) -> RedisCluster:
        options = {**self.address.options, **({"ssl": True} if self.address.tls else {})}
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self.address.hosts],
            require_full_coverage=False,
            retry=Retry(NoBackoff(), 1),
            **options,
        )

    def _pool_at(self, node: ClusterNode) -> ConnectionPool:
        address_key = (node.host, node.port)
        with self._lock:
            pool = self._pools.get(address_key)
            if pool is None:
                if len(self._pools) >= MAX_NODES:
                    # Most pools are of removed nodes. Connections in use close when released.
                    for old_pool in self._pools.values():
                        old_pool.disconnect(inuse_connections=False)
                    self._pools.clear()
                pool = self._pools[address_key] = _create_pool(self.address, *address_key)
            return pool


def servers_for(address: Address) -> Servers:
    """The servers of an address. Does not connect."""
    if address.cluster:
        return ClusterServers(address)
    return SentinelServers(address) if address.sentinel_master else SingleServer(address)


def _create_pool(address: Address, host: str = "", port: int = 0) -> ConnectionPool:
    """A connection pool for one server, by default the one in the address.

    The pool is unbounded: `Calls` limits the connections in use.
    """
    kind: type = Connection
    arguments: dict[str, Any] = {}
    if address.socket:
        kind, arguments = UnixDomainSocketConnection, {"path": address.socket}
    else:
        kind = SSLConnection if address.tls else Connection
        arguments = dict(
            zip(("host", "port"), (host, port) if host else address.hosts[0], strict=True)
        )
    return ConnectionPool(kind, retry=_no_retry(), **address.options, **arguments)


def _without_retry(options: dict[str, Any]) -> dict[str, Any]:
    """Connection options for a sentinel client, without retries."""
    return {**options, "retry": _no_retry()}


def _no_retry() -> Retry:
    """No retries: the wrappers of the tier retry and open the circuit breaker."""
    return Retry(NoBackoff(), 0)
