"""`ls`, `clear` and `stats --watch` at a real sidecar: the list equals the contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import (
    NAMESPACE,
    SLOT_BYTES,
    ForkedSidecar,
    disk,
    get,
    hashes_of,
    match,
    merge,
    put,
    run_command,
    wait_until,
)

from kvstore.blocks.key import Key
from kvstore.cli.common.sidecar_http import request_json
from kvstore.cli.stats import changes
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.ipc.client import Client
from kvstore.service.http.listing import ListFilter, list_blocks
from kvstore.shm.slab import Slab
from kvstore.store.store import Store
from kvstore.testing.processes import free_port
from kvstore.tiers.memory import MemoryTier

DIGEST = NAMESPACE.digest
TOKENS = {"token-a": "team-a", "token-b": "team-b"}
ADMIN = "of the admin"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    """team-a has five blocks in both tiers, team-b three; the first of team-a's is pinned."""
    folder = tmp_path_factory.mktemp("listing")
    server = {"server": {"auth_tokens": TOKENS, "admin_auth_token": ADMIN}}
    made = ForkedSidecar(folder, merge(disk(folder / "disk"), server))
    for token, count in (("token-a", 5), ("token-b", 3)):
        with Client(made.socket, NAMESPACE, auth_token=token, connect_timeout_s=30.0) as client:
            put(client, hashes_of(token, count))
            assert client.sync(10.0)
            assert len(match(client, hashes_of(token, count))) == count
    request_json(made.url, "/v1/flush", {}, auth_token=ADMIN)
    body = {"hashes": [hashes_of("token-a", 1)[0].hex()], "tenant": "team-a"}
    assert request_json(made.url, "/v1/pin", body, auth_token=ADMIN)["pinned"] == 1
    yield made
    assert made.stop() == 0


def ls(sidecar: ForkedSidecar, query: str = "", token: str | None = ADMIN) -> dict[str, Any]:
    return request_json(sidecar.url, f"/v1/ls?{query}", auth_token=token)


def sums(answer: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(group["tier"], group["tenant"]): group["blocks"] for group in answer["groups"]}


def test_sums_by_tier_tenant_and_namespace(sidecar: ForkedSidecar) -> None:
    answer = ls(sidecar)
    assert sums(answer) == {
        ("l2", "team-a"): 5,
        ("l2", "team-b"): 3,
        ("disk", "team-a"): 5,
        ("disk", "team-b"): 3,
    }
    assert (answer["left_off"], answer["unlisted"]) == (0, {})
    group = next(g for g in answer["groups"] if (g["tier"], g["tenant"]) == ("l2", "team-a"))
    assert (group["model"], group["namespace"]) == (NAMESPACE.model, DIGEST)
    assert group["bytes"] == 5 * SLOT_BYTES


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("tier=disk", {("disk", "team-a"): 5, ("disk", "team-b"): 3}),
        ("tenant=team-b", {("l2", "team-b"): 3, ("disk", "team-b"): 3}),
        (f"tier=l2&namespace={DIGEST}&tenant=team-a", {("l2", "team-a"): 5}),
        (f"namespace={'0' * 32}", {}),
        ("tenant=nobody", {}),
    ],
)
def test_filters(sidecar: ForkedSidecar, query: str, expected: dict[Any, int]) -> None:
    assert sums(ls(sidecar, query)) == expected


def test_blocks_one_by_one_within_a_bound(sidecar: ForkedSidecar) -> None:
    answer = ls(sidecar, "tier=l2&tenant=team-a&blocks=true")
    names = [block["hash"] for block in answer["blocks"]]
    assert sorted(names) == sorted(name.hex() for name in hashes_of("token-a", 5))
    pinned = [block["hash"] for block in answer["blocks"] if block["pinned"]]
    assert pinned == [hashes_of("token-a", 1)[0].hex()] == names[:1]
    assert {block["bytes"] for block in answer["blocks"]} == {SLOT_BYTES}
    short = ls(sidecar, "blocks=true&limit=3")
    assert len(short["blocks"]) == 3
    assert short["left_off"] == 16 - 3
    assert ls(sidecar, "limit=1")["left_off"] == 16 - 5


def test_the_most_recently_used_first(sidecar: ForkedSidecar) -> None:
    """Leading blocks are evicted last, so a prefix just looked up is listed in its order."""
    with Client(sidecar.socket, NAMESPACE, auth_token="token-b", connect_timeout_s=30.0) as client:
        put(client, hashes_of("fresh", 1))
        assert client.sync(10.0)
        wait_until(lambda: match(client, hashes_of("fresh", 1)), "the block")
        blocks = ls(sidecar, "tier=l2&tenant=team-b&blocks=true")["blocks"]
        assert blocks[0]["hash"] == hashes_of("fresh", 1)[0].hex()
    request_json(sidecar.url, "/v1/flush", {}, auth_token=ADMIN)


def test_a_tenant_sees_its_own_blocks_only(sidecar: ForkedSidecar) -> None:
    assert {tenant for _, tenant in sums(ls(sidecar, token="token-b"))} == {"team-b"}
    assert {tenant for _, tenant in sums(ls(sidecar, "tenant=team-b", token="token-b"))} == {
        "team-b"
    }
    for query, token in (("tenant=team-a", "token-b"), ("", None), ("", "wrong")):
        with pytest.raises(TierUnavailable, match="401"):
            ls(sidecar, query, token=token)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("tier=dsk", "unknown tier 'dsk'"),
        ("namespace=xyz", "32 hex digits"),
        ("limit=0", "1 to 10000"),
        ("limit=10001", "1 to 10000"),
        ("limit=many", "limit"),
    ],
)
def test_an_invalid_request_is_one_line(sidecar: ForkedSidecar, query: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ls(sidecar, query)


def test_the_commands(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    where = ("--url", sidecar.url, "--auth-token", ADMIN)
    code, out, err = run_command(tmp_path, "ls", "--tenant", "team-a", *where)
    assert (code, err) == (0, "")
    assert "team-a" in out
    assert "team-b" not in out
    code, out, _ = run_command(tmp_path, "ls", "--blocks", "--limit", "2", "--json", *where)
    assert len(json.loads(out)["blocks"]) == 2
    code, out, _ = run_command(tmp_path, "ls", "--blocks", "--tier", "l2", *where)
    assert code == 0
    assert "pinned" in out
    assert hashes_of("token-a", 1)[0].hex()[:16] in out
    code, out, err = run_command(tmp_path, "ls", "--tier", "dsk", *where)
    assert (code, out) == (2, "")
    assert err.startswith("kvstore: unknown tier")


def test_looked_up_prefixes(sidecar: ForkedSidecar, tmp_path: Path) -> None:
    with Client(sidecar.socket, NAMESPACE, auth_token="token-a", connect_timeout_s=30.0) as client:
        assert len(get(client, hashes_of("token-a", 5))[0]) == 5
    where = ("--url", sidecar.url, "--auth-token", ADMIN, "--prefixes", "--tenant", "team-a")

    def run() -> dict[str, Any]:
        _, out, _ = run_command(tmp_path, "ls", *where, "--json")
        listed: dict[str, Any] = json.loads(out)
        return listed

    wait_until(lambda: run()["prefixes"], "the run")
    report = run()
    assert sum(chain["blocks"] for chain in report["prefixes"]) == 5
    assert report["prefixes"][0]["cached"]["l2"] >= 1
    code, out, _ = run_command(tmp_path, "ls", *where)
    assert code == 0
    assert "team-a" in out
    assert run_command(tmp_path, "ls", *where, "--blocks")[0] == 2


def test_clear_deletes_blocks_and_requires_confirmation(tmp_path: Path) -> None:
    sidecar = ForkedSidecar(tmp_path, disk(tmp_path / "disk"))
    where = ("--url", sidecar.url)
    with Client(sidecar.socket, NAMESPACE, connect_timeout_s=30.0) as client:
        put(client, hashes_of("to go", 4))
        assert client.sync(10.0)
        request_json(sidecar.url, "/v1/flush", {})
        code, out, err = run_command(tmp_path, "clear", "all", *where)
        assert (code, out) == (2, "")
        assert "--yes" in err
        assert len(match(client, hashes_of("to go", 4))) == 4
        code, out, _ = run_command(tmp_path, "clear", "l2", "--yes", *where)
        assert (code, out) == (0, "l2: cleared\n")
        assert match(client, hashes_of("to go", 4)) == ["disk"] * 4
        code, out, _ = run_command(tmp_path, "clear", "disk", "-y", "--json", *where)
        assert (code, json.loads(out)) == (0, {"cleared": "disk"})
        assert match(client, hashes_of("to go", 4)) == []
        code, out, _ = run_command(tmp_path, "ls", *where)
        assert (code, out) == (0, "no blocks\n")
        code, _, err = run_command(tmp_path, "clear", "dsk", "--yes", *where)
        assert code == 2
        assert "unknown tier 'dsk'" in err
    assert sidecar.stop() == 0


def test_a_tier_that_cannot_be_listed_has_a_reason() -> None:
    class Blind(MemoryTier):
        def usage(self) -> Iterator[tuple[Key, int]]:
            raise NotImplementedError

    class Away(MemoryTier):
        def usage(self) -> Iterator[tuple[Key, int]]:
            raise TierUnavailable("nobody answers")

    tiers = [MemoryTier(name="seen"), Blind(name="blind"), Away(name="away")]
    with Store(Slab.create(32, SLOT_BYTES), tiers) as store:
        with store.session(NAMESPACE) as session:
            put(session, hashes_of("x", 2))
        assert store.flush()
        answer = list_blocks(store, ListFilter(None, None, None, False, 10))
        assert sums(answer)["seen", "default"] == 2
        assert answer["unlisted"]["blind"] == "this tier has no list of its blocks"
        assert answer["unlisted"]["away"] == "nobody answers"


def test_watch_continues_through_a_restart(tmp_path: Path) -> None:
    port = free_port()
    sidecar = ForkedSidecar(tmp_path, {"server": {"port": port}})
    where = ("--socket", sidecar.socket, "--watch", "--interval", "0.1")
    code, out, err = run_command(tmp_path, "stats", *where, "--count", "3", "--json")
    assert (code, err) == (0, "")
    looks = [json.loads(line) for line in out.splitlines()]
    assert len(looks) == 3
    assert all(look["l2"]["slots"] > 0 for look in looks)
    assert looks[0]["at"] < looks[2]["at"]
    code, out, _ = run_command(tmp_path, "stats", *where, "--count", "2")
    assert code == 0
    assert "per second: 0.0 blocks hit in l2" in " ".join(out.split())
    sidecar.kill()
    code, out, _ = run_command(tmp_path, "stats", *where, "--count", "2", "--json")
    assert code == 0
    assert all("error" in json.loads(line) for line in out.splitlines())
    code, out, err = run_command(tmp_path, "stats", *where, "--count", "2")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    code, _, err = run_command(tmp_path, "stats", *where[:3], "--interval", "0")
    assert code == 2
    assert "--interval" in err


def test_rates_count_from_zero_after_a_restart() -> None:
    def numbers(hits: int, read: int) -> dict[str, Any]:
        return {
            "hit_blocks": {"l2": hits},
            "l2": {"stored": 10, "evictions": 0},
            "tiers": {"disk": {"read_bytes": read, "write_bytes": 0}},
        }

    said = changes(numbers(10, 0), numbers(30, 4 << 20), 2.0)
    assert said.startswith("10.0 blocks hit in l2; 0.0 saved; 0.0 evicted; disk 2 MiB read, 0 B")
    assert changes(numbers(100, 0), numbers(30, 0), 2.0).startswith("15.0 blocks hit")
