"""The sidecar's HTTP side for administrators: flush, clear, pin, unpin, warm.

    POST /v1/flush, /v1/clear?tier=l2|<tier>|all
    POST /v1/pin, /v1/unpin   {"namespace": digest, "hashes": [hex, ...], "tenant": name}
    POST /v1/warm             {"share": 0.5}

A run to pin is named by its block hashes or by its token ids from the first on ("tokens", and
"cache_salt" where the requests have one), which are hashed as the configuration says. "namespace"
may be left out while engines of one namespace only have been here, "tenant" while there is none.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request

from kvstore.blocks.hashing import BlockHasher
from kvstore.errors import ConfigError
from kvstore.ipc.protocol import MAX_HASHES
from kvstore.service.auth import DEFAULT_TENANT
from kvstore.service.http.app import Service, bearer, hashes_in, in_time, namespace_in, small_body

PIN_KEYS: Final = {"namespace", "hashes", "tokens", "cache_salt", "tenant"}


def add_care(app: FastAPI, service: Service) -> None:
    """The routes, each for the administrator alone."""
    store = service.store

    @app.post("/v1/flush")
    async def flush(request: Request) -> dict[str, bool]:
        service.tenants.check_admin(bearer(request))
        return {"flushed": await service.look_after(store.flush, service.flush_s)}

    @app.post("/v1/clear")
    async def clear(tier: str, request: Request) -> dict[str, str]:
        service.tenants.check_admin(bearer(request))
        await service.look_after(store.clear, tier)
        return {"cleared": tier}

    @app.post("/v1/pin")
    async def pin(request: Request) -> dict[str, Any]:
        space, hashes, tenant = await _run(service, request)
        done = await service.look_after(store.pin, space, hashes, tenant, service.flush_s)
        return {"wanted": done.wanted, "pinned": done.pinned, "reason": done.reason}

    @app.post("/v1/unpin")
    async def unpin(request: Request) -> dict[str, int]:
        space, hashes, tenant = await _run(service, request)
        return {"unpinned": await service.look_after(store.unpin, space, hashes, tenant)}

    @app.post("/v1/warm")
    async def warm(request: Request) -> dict[str, int]:
        service.tenants.check_admin(bearer(request))
        body = await in_time(small_body(request), service.transfer_s)
        share = body.get("share") if isinstance(body, dict) else None
        if not isinstance(share, int | float) or not 0 <= share <= 1 or len(body) != 1:
            raise HTTPException(422, 'the body is {"share": 0.5}, from 0 to 1')
        warm = service.look_after(store.warmer.warm, float(share), lane=service.warming)
        return {"warmed": await warm}


async def _run(service: Service, request: Request) -> tuple[str, list[bytes], str]:
    """(namespace, hashes, tenant) of a request to pin or unpin; 422 for another body."""
    service.tenants.check_admin(bearer(request))
    body = await in_time(small_body(request), service.transfer_s)
    given = set(body) if isinstance(body, dict) else set()
    if given - PIN_KEYS or len(given & {"hashes", "tokens"}) != 1:
        raise HTTPException(
            422, 'the body has "hashes" or "tokens", and of namespace, tenant, cache_salt any'
        )
    if "cache_salt" in given and "hashes" in given:
        raise HTTPException(422, "cache_salt goes with tokens: hashes have it in them already")
    tenant = body.get("tenant", DEFAULT_TENANT)
    if not isinstance(tenant, str) or not tenant:
        raise HTTPException(422, "tenant is a name")
    space = _namespace(service, body.get("namespace"))
    if "hashes" in given:
        return space, hashes_in(body["hashes"]), tenant
    return space, _hashed(service, space, body["tokens"], body.get("cache_salt")), tenant


def _namespace(service: Service, digest: Any) -> str:
    if digest is not None:
        return namespace_in(digest)
    known = list(service.store.namespaces())
    if len(known) != 1:
        raise ConfigError(
            f"engines of {len(known)} namespaces have been here ({', '.join(known) or 'none'}); "
            "say which"
        )
    return known[0]


def _hashed(service: Service, digest: str, tokens: Any, salt: Any) -> list[bytes]:
    """Hashes of a prompt's full blocks."""
    namespace = service.store.namespaces().get(digest)
    if namespace is None:
        raise ConfigError(f"no engine of the namespace {digest} has been here; give hashes")
    if not isinstance(tokens, list) or len(tokens) > MAX_HASHES * namespace.block_tokens:
        raise HTTPException(422, "tokens is a list of token ids")
    if salt is not None and not isinstance(salt, str):
        raise HTTPException(422, "cache_salt is text")
    hasher = BlockHasher(
        service.hash.algorithm,
        namespace.block_tokens,
        seed=service.hash.seed or None,
        cache_salt=salt,
    )
    try:
        hashes = hasher.feed(tokens)
    except (TypeError, ValueError) as error:
        raise HTTPException(422, f"tokens: {error}") from None
    if not hashes:
        raise ConfigError(
            f"{len(tokens)} tokens have no full block of {namespace.block_tokens}; "
            "nothing can be pinned"
        )
    return hashes
