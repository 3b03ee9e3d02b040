"""HTTP route for routers: the prefix that each engine has cached, from the events it publishes.

Requires the administrator, because engines do not publish the tenant of a block.

    POST /v1/engines    {"hashes": [hex, ...], "group": 0}
    ->                  {"prefix_blocks": {endpoint: {medium: cached blocks of the prefix}}}
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request

from kvstore.events.engine_index import EngineIndex
from kvstore.service.http.app import Service, bearer_token, hashes_in, json_body, receive_within


def add_engines(app: FastAPI, service: Service, index: EngineIndex) -> None:
    """Add the route."""

    @app.post("/v1/engines")
    async def engines(request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer_token(request))
        body = await receive_within(json_body(request), service.transfer_timeout_s)
        if not isinstance(body, dict) or not {"hashes"} <= set(body) <= {"hashes", "group"}:
            raise HTTPException(422, 'the body must be {"hashes": [hex, ...], "group": 0}')
        group = body.get("group", 0)
        if type(group) is not int or group < 0:
            raise HTTPException(422, "group must be the number of a KV group (0 for most models)")
        return {"prefix_blocks": index.prefix_lengths(hashes_in(body["hashes"]), group)}
