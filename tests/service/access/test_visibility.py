"""Statistics for a tenant's auth token: the node's totals, and no other tenant's name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    ForkedSidecar,
    disk,
    hashes_of,
    match,
    put,
    run_command,
    wait_until,
)

from kvstore.ipc.client import Client

TOKENS = {"token-a": "team-anna", "token-b": "team-bert"}
ADMIN = "token-of-the-admin"
OTHERS_MODEL = replace(NAMESPACE, model="berts-secret-model")
FORBIDDEN = ("team-bert", "berts-secret-model", OTHERS_MODEL.digest, "berts-engine", "berts-route")
PATHS = (
    "/v1/stats",
    "/v1/dashboard",
    "/v1/ls?blocks=true",
    "/v1/ls",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    """Engines of two tenants, both connected."""
    folder = tmp_path_factory.mktemp("shared")
    server = {"auth_tokens": TOKENS, "admin_auth_token": ADMIN}
    made = ForkedSidecar(folder, {**disk(folder / "disk"), "server": server})
    with (
        Client(
            made.socket, NAMESPACE, auth_token="token-a", name="annas", response_timeout_s=LIMIT_S
        ) as one,
        Client(
            made.socket,
            OTHERS_MODEL,
            auth_token="token-b",
            name="berts-engine",
            traffic_label="berts-route",
            response_timeout_s=LIMIT_S,
        ) as two,
    ):
        for client in (one, two):
            names = hashes_of("prompt", 6)
            match(client, names)
            put(client, names)
            assert client.sync(LIMIT_S)
        wait_until(
            lambda: len(asked(made, "/v1/stats", ADMIN)["tiers"]["disk"]["codec"]) == 2, "codecs"
        )
        wait_until(
            lambda: len(asked(made, "/v1/dashboard", ADMIN)["prefixes"]["chains"]) == 2, "prefixes"
        )
        yield made
    assert made.stop() == 0


def asked(sidecar: ForkedSidecar, path: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(sidecar.url + path)
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


@pytest.mark.parametrize("path", PATHS)
def test_no_route_names_another_tenant(shared: ForkedSidecar, path: str) -> None:
    whole = json.dumps(asked(shared, path, ADMIN))
    assert "team-bert" in whole
    mine = json.dumps(asked(shared, path, "token-a"))
    assert not [word for word in FORBIDDEN if word in mine]
    assert NAMESPACE.digest in mine


def test_the_socket_shows_no_more(shared: ForkedSidecar) -> None:
    assert "team-bert" in json.dumps(shared.stats(ADMIN))
    mine = json.dumps(shared.stats("token-a"))
    assert not [word for word in FORBIDDEN if word in mine]
    assert "team-anna" in mine


def test_every_tenant_sees_the_nodes_totals(shared: ForkedSidecar) -> None:
    mine, whole = (asked(shared, "/v1/stats", token) for token in ("token-a", ADMIN))
    assert mine["l2"]["slots_ready"] == whole["l2"]["slots_ready"] == 12
    assert mine["tiers"]["disk"]["blocks"] == whole["tiers"]["disk"]["blocks"]
    assert mine["usage"]["users"] == [
        user for user in whole["usage"]["users"] if user["tenant"] == "team-anna"
    ]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/clear?tier=l2"),
        ("POST", "/v1/flush"),
        ("POST", "/v1/pin"),
        ("POST", "/v1/unpin"),
        ("POST", "/v1/warm"),
        ("POST", "/v1/reload"),
        ("GET", f"/v1/dashboard/prefix?tenant=team-bert&namespace={NAMESPACE.digest}&hash=00"),
        ("GET", "/v1/ls?tenant=team-bert"),
    ],
)
def test_a_tenant_is_not_an_administrator(shared: ForkedSidecar, method: str, path: str) -> None:
    request = urllib.request.Request(shared.url + path, method=method)
    request.add_header("Authorization", "Bearer token-a")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    assert refused.value.code == 401
    refused.value.close()


def test_the_administrator_may_warm_and_see_all(shared: ForkedSidecar, tmp_path: Any) -> None:
    code, out, err = run_command(
        tmp_path, "stats", "--url", shared.url, "--auth-token", ADMIN, "--json"
    )
    assert (code, err) == (0, "")
    assert "team-bert" in out
