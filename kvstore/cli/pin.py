"""`kvstore pin` and `kvstore unpin`: keep the blocks of a prompt in a sidecar's L2."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer

TIMEOUT_S: Final = 60.0
"""Pinning waits for loads."""

TokenIds = Annotated[
    str | None,
    typer.Option(help="File with the prompt's token ids, or - for stdin."),
]
Hashes = Annotated[
    str | None,
    typer.Option(help="File with block hashes in hex, one per line, or - for stdin."),
]
Space = Annotated[
    str | None,
    typer.Option(help="Digest of the namespace. Required if the sidecar has several."),
]
Tenant = Annotated[
    str | None, typer.Option(help="Tenant of the blocks, if the sidecar has tenants.")
]
Salt = Annotated[str | None, typer.Option(help="cache_salt of the requests.")]
Url = Annotated[
    str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
]
Token = Annotated[
    str | None, typer.Option(help="The sidecar's admin auth token, if it requires one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command()
    def pin(
        token_ids: TokenIds = None,
        hashes: Hashes = None,
        namespace: Space = None,
        tenant: Tenant = None,
        cache_salt: Salt = None,
        url: Url = None,
        auth_token: Token = None,
        as_json: Json = False,
    ) -> None:
        """Load a prompt's blocks into L2 and keep them there until `kvstore unpin`.

        Exits with 1 if not all blocks are pinned.
        """
        body = _body(token_ids, hashes, namespace, tenant, cache_salt)
        answer = _post(url, "/v1/pin", body, auth_token)
        if as_json:
            print(json.dumps(answer))
        else:
            print(f"{answer['pinned']} of {answer['wanted']} blocks pinned")
            if answer["reason"]:
                print(answer["reason"])
        if answer["reason"]:
            raise typer.Exit(1)

    @app.command()
    def unpin(
        token_ids: TokenIds = None,
        hashes: Hashes = None,
        namespace: Space = None,
        tenant: Tenant = None,
        cache_salt: Salt = None,
        url: Url = None,
        auth_token: Token = None,
        as_json: Json = False,
    ) -> None:
        """Unpin a prompt's blocks, so that they can be evicted."""
        body = _body(token_ids, hashes, namespace, tenant, cache_salt)
        answer = _post(url, "/v1/unpin", body, auth_token)
        print(json.dumps(answer) if as_json else f"{answer['unpinned']} blocks unpinned")


def _post(
    url: str | None, path: str, body: dict[str, Any], auth_token: str | None
) -> dict[str, Any]:
    from kvstore.cli.common.sidecar_http import request_json, sidecar_url

    return request_json(sidecar_url(url), path, body, auth_token=auth_token, timeout_s=TIMEOUT_S)


def _body(
    token_ids: str | None,
    hashes: str | None,
    namespace: str | None,
    tenant: str | None,
    cache_salt: str | None,
) -> dict[str, Any]:
    """Return the request's body, which identifies the blocks."""
    from kvstore.cli.hash import parse_token_ids, read_text
    from kvstore.errors import ConfigError

    if (token_ids is None) == (hashes is None):
        raise ConfigError("give either --token-ids or --hashes")
    ids = None if token_ids is None else parse_token_ids(read_text(token_ids, "token ids"))
    body: dict[str, Any] = {
        "namespace": namespace,
        "tenant": tenant,
        "cache_salt": cache_salt,
        "token_ids": ids,
        "hashes": None if hashes is None else read_text(hashes, "hashes").split(),
    }
    return {name: value for name, value in body.items() if value is not None}
