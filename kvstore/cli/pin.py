"""`kvstore pin` and `kvstore unpin`: keep a run of blocks in a sidecar's L2."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer

LIMIT_S: Final = 60.0
"""Pinning waits for loads."""

Tokens = Annotated[
    str | None,
    typer.Option(help="The run's token ids, from the first: - reads stdin, else a file."),
]
Hashes = Annotated[
    str | None, typer.Option(help="Or its block hashes in hex, one a line: - or a file.")
]
Space = Annotated[
    str | None, typer.Option(help="Digest of the namespace, where there are several.")
]
Tenant = Annotated[str | None, typer.Option(help="Whose blocks, where there are tenants.")]
Salt = Annotated[str | None, typer.Option(help="The requests' cache_salt.")]
Url = Annotated[str | None, typer.Option(help="The sidecar's HTTP side, http://host:port.")]
Token = Annotated[str | None, typer.Option(help="The admin token, where it asks for one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command()
    def pin(
        tokens: Tokens = None,
        hashes: Hashes = None,
        namespace: Space = None,
        tenant: Tenant = None,
        cache_salt: Salt = None,
        url: Url = None,
        token: Token = None,
        as_json: Json = False,
    ) -> None:
        """Keep a prompt's blocks in L2, loading what is not there, until unpinned.

        Exit code 1 when not all of it is pinned.
        """
        body = _run(tokens, hashes, namespace, tenant, cache_salt)
        answer = _ask(url, "/v1/pin", body, token)
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
        tokens: Tokens = None,
        hashes: Hashes = None,
        namespace: Space = None,
        tenant: Tenant = None,
        cache_salt: Salt = None,
        url: Url = None,
        token: Token = None,
        as_json: Json = False,
    ) -> None:
        """Let a prompt's blocks be evicted again."""
        body = _run(tokens, hashes, namespace, tenant, cache_salt)
        answer = _ask(url, "/v1/unpin", body, token)
        print(json.dumps(answer) if as_json else f"{answer['unpinned']} blocks unpinned")


def _ask(url: str | None, path: str, body: dict[str, Any], token: str | None) -> dict[str, Any]:
    from kvstore.cli.common.sidecar_http import address, ask

    return ask(address(url), path, body, token=token, limit_s=LIMIT_S)


def _run(
    tokens: str | None,
    hashes: str | None,
    namespace: str | None,
    tenant: str | None,
    cache_salt: str | None,
) -> dict[str, Any]:
    """The request's body: which run is meant."""
    from kvstore.cli.hash import parse_token_ids, read_text
    from kvstore.errors import ConfigError

    if (tokens is None) == (hashes is None):
        raise ConfigError("give --tokens or --hashes, one of them, to name the run")
    body: dict[str, Any] = {
        "namespace": namespace,
        "tenant": tenant,
        "cache_salt": cache_salt,
        "tokens": None if tokens is None else parse_token_ids(read_text(tokens, "token ids")),
        "hashes": None if hashes is None else read_text(hashes, "hashes").split(),
    }
    return {name: value for name, value in body.items() if value is not None}
