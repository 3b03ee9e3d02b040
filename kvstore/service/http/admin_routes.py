"""HTTP routes for administrators: flush, clear, pin, unpin, warm.

    POST /v1/flush, /v1/clear?tier=l2|<tier>|all
    POST /v1/pin, /v1/unpin   {"namespace": digest, "hashes": [hex, ...], "tenant": name}
    POST /v1/warm             {"fraction": 0.5}

A prefix to pin is given by its block hashes, or by its token ids ("token_ids", and "cache_salt" if
the requests have one), which are hashed as configured. "namespace" may be left out while engines of
only one namespace have connected; "tenant" may be left out without auth tokens.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request

from kvstore.blocks.hashing import BlockHasher
from kvstore.config.renamed import refuse_body
from kvstore.errors import ConfigError
from kvstore.ipc.protocol import MAX_HASHES
from kvstore.service.access.auth import DEFAULT_TENANT
from kvstore.service.http.app import (
    Service,
    bearer_token,
    hashes_in,
    json_body,
    namespace_in,
    receive_within,
)

PIN_KEYS: Final = {"namespace", "hashes", "token_ids", "cache_salt", "tenant"}


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Add the routes; each requires the administrator."""
    store = service.store

    @app.post("/v1/flush")
    async def flush(request: Request) -> dict[str, bool]:
        service.tenants.check_admin(bearer_token(request))
        return {"flushed": await service.run_admin_call(store.flush, service.flush_timeout_s)}

    @app.post("/v1/clear")
    async def clear(tier: str, request: Request) -> dict[str, str]:
        service.tenants.check_admin(bearer_token(request))
        await service.run_admin_call(store.clear, tier)
        return {"cleared": tier}

    @app.post("/v1/pin")
    async def pin(request: Request) -> dict[str, Any]:
        space, hashes, tenant = await _pin_request(service, request)
        done = await service.run_admin_call(
            store.pin, space, hashes, tenant, service.flush_timeout_s
        )
        return {"wanted": done.wanted, "pinned": done.pinned, "reason": done.reason}

    @app.post("/v1/unpin")
    async def unpin(request: Request) -> dict[str, int]:
        space, hashes, tenant = await _pin_request(service, request)
        return {"unpinned": await service.run_admin_call(store.unpin, space, hashes, tenant)}

    @app.post("/v1/warm")
    async def warm(request: Request) -> dict[str, int]:
        service.tenants.check_admin(bearer_token(request))
        body = await receive_within(json_body(request), service.transfer_timeout_s)
        refuse_body("/v1/warm", body)
        fraction = body.get("fraction") if isinstance(body, dict) else None
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1 or len(body) != 1:
            raise HTTPException(422, 'the body must be {"fraction": 0.5}, from 0 to 1')
        warm = service.run_admin_call(
            store.warmer.warm, float(fraction), bulkhead=service.warm_calls
        )
        return {"warmed": await warm}


async def _pin_request(service: Service, request: Request) -> tuple[str, list[bytes], str]:
    """(namespace, hashes, tenant) of a request to pin or unpin; 422 for an invalid body."""
    service.tenants.check_admin(bearer_token(request))
    body = await receive_within(json_body(request), service.transfer_timeout_s)
    refuse_body(request.url.path, body)
    given = set(body) if isinstance(body, dict) else set()
    if given - PIN_KEYS or len(given & {"hashes", "token_ids"}) != 1:
        raise HTTPException(
            422,
            'the body must have "hashes" or "token_ids"; optional: namespace, tenant, cache_salt',
        )
    if "cache_salt" in given and "hashes" in given:
        raise HTTPException(422, "cache_salt requires token_ids: hashes already include it")
    tenant = body.get("tenant", DEFAULT_TENANT)
    if not isinstance(tenant, str) or not tenant:
        raise HTTPException(422, "tenant must be a name")
    space = _namespace(service, body.get("namespace"))
    if "hashes" in given:
        return space, hashes_in(body["hashes"]), tenant
    return space, _hash_tokens(service, space, body["token_ids"], body.get("cache_salt")), tenant


def _namespace(service: Service, digest: Any) -> str:
    if digest is not None:
        return namespace_in(digest)
    known = list(service.store.namespaces())
    if len(known) != 1:
        raise ConfigError(
            f"namespace is required: engines of {len(known)} namespaces have connected "
            f"({', '.join(known) or 'none'})"
        )
    return known[0]


def _hash_tokens(service: Service, digest: str, token_ids: Any, cache_salt: Any) -> list[bytes]:
    """The hashes of a prompt's full blocks."""
    namespace = service.store.namespaces().get(digest)
    if namespace is None:
        raise ConfigError(f"no engine of the namespace {digest} has connected; give hashes")
    if not isinstance(token_ids, list) or len(token_ids) > MAX_HASHES * namespace.block_tokens:
        raise HTTPException(422, f"token_ids must be a list of at most {MAX_HASHES} blocks")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise HTTPException(422, "cache_salt must be text")
    hasher = BlockHasher(
        service.hash.algorithm,
        namespace.block_tokens,
        seed=service.hash.seed or None,
        cache_salt=cache_salt,
    )
    try:
        hashes = hasher.feed(token_ids)
    except (TypeError, ValueError) as error:
        raise HTTPException(422, f"token_ids: {error}") from None
    if not hashes:
        raise ConfigError(
            f"{len(token_ids)} tokens are less than one block of {namespace.block_tokens}; "
            "nothing to pin"
        )
    return hashes
