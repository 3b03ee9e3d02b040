"""What engines hold, as they publish it: asked over HTTP, by whoever decides where a request goes.

For administrators: engines do not publish whose a block is.

    POST /v1/engines    {"hashes": [hex, ...], "group": 0}
    ->                  {"runs": {endpoint: {medium: blocks of the leading run}}}
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request

from kvstore.events.engine_index import EngineIndex
from kvstore.service.http.app import Service, bearer, hashes_in, in_time, small_body


def add_engines(app: FastAPI, service: Service, index: EngineIndex) -> None:
    """Add the route."""

    @app.post("/v1/engines")
    async def engines(request: Request) -> dict[str, Any]:
        service.tenants.check_admin(bearer(request))
        body = await in_time(small_body(request), service.transfer_s)
        if not isinstance(body, dict) or not {"hashes"} <= set(body) <= {"hashes", "group"}:
            raise HTTPException(422, 'the body is {"hashes": [hex, ...], "group": 0}')
        group = body.get("group", 0)
        if type(group) is not int or group < 0:
            raise HTTPException(422, "group is the number of a KV group, 0 for most models")
        return {"runs": index.runs(hashes_in(body["hashes"]), group)}
