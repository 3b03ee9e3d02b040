"""The Redis and Valkey tier: one string per frame, on a server, a Sentinel master or a cluster.

[[tiers]]
kind = "redis"
url = "rediss://cache-1:6380/0"
password = "..."

tier       the tier's operations
calls      connections, and calls to one or all servers
exchange   one request and its reply on a connection
resp       the wire protocol (RESP2) for values
servers    which server has a key
address    server addresses and credentials from the configuration
config     the configuration keys
keys       key names on the server
info       INFO of the servers
faults     mapping of errors
"""

from __future__ import annotations

import logging

from kvstore.errors import ConfigError, TierError
from kvstore.tiers.redis.address import Address, address_of
from kvstore.tiers.redis.config import Config
from kvstore.tiers.redis.info import Info
from kvstore.tiers.redis.servers import servers_for
from kvstore.tiers.redis.tier import RedisTier

__all__ = ["Config", "RedisTier", "check", "open"]

log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """Raises ConfigError: the address is invalid. Does not connect to a server."""
    address_of(config)


def open(config: Config) -> RedisTier:
    """Open the tier. An unreachable server is not an error: the tier works once it is reachable.

    Raises ConfigError: the address is invalid, the server rejects the user or password, or it is
    not of the configured kind (a cluster node, for example).
    """
    address = address_of(config)
    tier = RedisTier(
        servers_for(address),
        prefix=config.prefix,
        ttl_ms=round(config.ttl),
        connections=config.connections,
        timeout_s=config.timeout / 1e3,
        name=config.name,
    )
    try:
        _check_servers(tier, address, expires=bool(config.ttl))
    except ConfigError:
        tier.close()
        raise
    return tier


def _check_servers(tier: RedisTier, address: Address, *, expires: bool) -> None:
    """Check the reachable servers: raise for a wrong configuration, warn about a risky one."""
    try:
        infos = tier.query_info()
    except TierError as error:
        if type(error) is TierError:  # permanent: the server rejects us, but is reachable
            raise ConfigError(f"cannot open the redis tier: {error}") from None
        log.warning("%s: not reachable yet: %s", tier.name, error)
        return
    clustered = any(info.get("redis_mode", info.get("server_mode")) == "cluster" for info in infos)
    if clustered and not address.cluster:
        raise ConfigError(f"{address} is a node of a cluster; use the key cluster for it")
    for info in infos:
        warning = _memory_warning(info, expires=expires)
        if warning:
            log.warning("%s: %s %s", tier.name, address, warning)
            break


def _memory_warning(info: Info, *, expires: bool) -> str:
    """A warning about a server's memory settings; "" if they are fine."""
    policy = info.get("maxmemory_policy", "")
    if info.get("maxmemory", "0") == "0":
        return "has no maxmemory and may use all memory of its machine; set maxmemory"
    if policy == "noeviction":
        return "has maxmemory-policy noeviction and rejects writes once it is full; use allkeys-lru"
    if policy.startswith("volatile") and not expires:
        return (
            f"has maxmemory-policy {policy}, which evicts only keys with a TTL; set the tier's "
            "ttl, or use allkeys-lru"
        )
    return ""
