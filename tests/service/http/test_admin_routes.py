"""Pin, unpin and warm over HTTP and from the command line, at a real sidecar."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sidecar_rig import (
    NAMESPACE,
    SLOTS,
    ForkedSidecar,
    disk,
    get,
    hashes_of,
    match,
    merge,
    put,
    run_command,
)

from kvstore.blocks.hashing import hash_tokens
from kvstore.cli.common.sidecar_http import request_json
from kvstore.errors import ConfigError, TierUnavailable
from kvstore.ipc.client import Client

DIGEST = NAMESPACE.digest
TOKENS = list(range(1000, 1023))
RUN = hash_tokens(TOKENS, block_tokens=NAMESPACE.block_tokens)
PINS = SLOTS // 4


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    folder = tmp_path_factory.mktemp("care")
    made = ForkedSidecar(
        folder, merge(disk(folder / "disk"), {"limits": {"shutdown_drain_timeout": 5000}})
    )
    yield made
    assert made.stop() == 0


@pytest.fixture
def client(sidecar: ForkedSidecar) -> Iterator[Client]:
    made = Client(sidecar.socket, NAMESPACE, connect_timeout_s=30.0)
    yield made
    made.close()


def saved(client: Client, names: Sequence[bytes]) -> None:
    """Save blocks and wait until they are visible: HTTP requests use another socket."""
    put(client, names)
    assert len(match(client, names)) == len(names)


def crowd_out(sidecar: ForkedSidecar, client: Client, name: str) -> None:
    """Save more blocks than L2 has slots."""
    for number in range(2 * SLOTS // 8):
        put(client, hashes_of(f"{name} {number}", 8))
        request_json(sidecar.url, "/v1/flush", {})


def test_a_prefix_given_by_token_ids_is_pinned_and_unpinned(
    sidecar: ForkedSidecar, client: Client
) -> None:
    saved(client, RUN)
    request_json(sidecar.url, "/v1/flush", {})
    request_json(sidecar.url, "/v1/clear?tier=l2", {})
    answer = request_json(sidecar.url, "/v1/pin", {"token_ids": TOKENS})
    assert answer == {"wanted": len(RUN), "pinned": len(RUN), "reason": ""}
    crowd_out(sidecar, client, "first")
    assert match(client, RUN) == ["l2"] * len(RUN)
    assert sidecar.stats()["l2"]["slots_pinned"] == len(RUN)
    hashes = [name.hex() for name in RUN]
    body = {"namespace": DIGEST, "hashes": hashes, "tenant": "default"}
    assert request_json(sidecar.url, "/v1/unpin", body) == {"unpinned": len(RUN)}
    crowd_out(sidecar, client, "second")
    assert match(client, RUN) == ["disk"] * len(RUN)


def test_another_salt_is_another_prefix(sidecar: ForkedSidecar, client: Client) -> None:
    salted = hash_tokens(TOKENS, block_tokens=NAMESPACE.block_tokens, cache_salt="a")
    saved(client, salted)
    body = {"token_ids": TOKENS, "cache_salt": "a"}
    assert request_json(sidecar.url, "/v1/pin", body)["pinned"] == len(salted)
    assert (
        request_json(sidecar.url, "/v1/pin", {"token_ids": TOKENS, "cache_salt": "b"})["pinned"]
        == 0
    )
    assert request_json(sidecar.url, "/v1/unpin", body)["unpinned"] == len(salted)


def test_pins_stop_at_the_maximum(sidecar: ForkedSidecar, client: Client) -> None:
    names = hashes_of("long", PINS + 5)
    saved(client, names)
    body = {"hashes": [name.hex() for name in names]}
    answer = request_json(sidecar.url, "/v1/pin", body)
    assert answer["pinned"] == PINS
    assert "max_pinned_fraction" in answer["reason"]
    assert request_json(sidecar.url, "/v1/unpin", body) == {"unpinned": PINS}


def test_warm_over_http(sidecar: ForkedSidecar, client: Client) -> None:
    names = hashes_of("warm", 6)
    saved(client, names)
    request_json(sidecar.url, "/v1/flush", {})
    request_json(sidecar.url, "/v1/clear?tier=l2", {})
    warmed = request_json(sidecar.url, "/v1/warm", {"fraction": 0.5})["warmed"]
    assert warmed == SLOTS // 2
    blocks, _ = get(client, names)
    assert len(blocks) == 6


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/pin", {}, '"hashes" or "token_ids"'),
        ("/v1/pin", [], '"hashes" or "token_ids"'),
        ("/v1/pin", {"token_ids": [1], "hashes": []}, '"hashes" or "token_ids"'),
        ("/v1/pin", {"token_ids": [1, 2, 3]}, "less than one block of 4"),
        ("/v1/pin", {"token_ids": "a"}, "must be a list"),
        ("/v1/pin", {"token_ids": ["a"] * 8}, "token_ids: "),
        ("/v1/pin", {"token_ids": [-1] * 8}, "token_ids: "),
        ("/v1/pin", {"token_ids": TOKENS, "cache_salt": 3}, "cache_salt must be text"),
        ("/v1/pin", {"token_ids": TOKENS, "tenant": 3}, "tenant must be a name"),
        ("/v1/pin", {"token_ids": TOKENS, "namespace": "x"}, "32 hex digits"),
        ("/v1/pin", {"token_ids": TOKENS, "namespace": "0" * 32}, "has connected"),
        ("/v1/unpin", {"hashes": ["zz"]}, "lower-case hex"),
        ("/v1/unpin", {"hashes": ["aa"], "cache_salt": "x"}, "requires token_ids"),
        ("/v1/warm", {"fraction": 2}, "from 0 to 1"),
        ("/v1/warm", {"fraction": "half"}, "from 0 to 1"),
        ("/v1/warm", {}, "from 0 to 1"),
        ("/v1/pin", {"tokens": TOKENS}, "/v1/pin: tokens is now token_ids"),
        ("/v1/unpin", {"tokens": TOKENS}, "/v1/unpin: tokens is now token_ids"),
        ("/v1/warm", {"share": 0.5}, "/v1/warm: share is now fraction"),
    ],
)
def test_an_invalid_request_is_one_line(
    sidecar: ForkedSidecar, client: Client, path: str, body: Any, words: str
) -> None:
    client.poll()
    with pytest.raises(ConfigError, match=words) as caught:
        request_json(sidecar.url, path, body)
    assert "\n" not in str(caught.value)


def test_administration_requires_the_administrator(tmp_path: Path) -> None:
    server = {"server": {"auth_tokens": {"token-a": "team-a"}, "admin_auth_token": "of the admin"}}
    made = ForkedSidecar(tmp_path, server)
    for path, body in (
        ("/v1/pin", {"token_ids": TOKENS}),
        ("/v1/unpin", {"token_ids": TOKENS}),
        ("/v1/warm", {"fraction": 0.1}),
    ):
        for token in (None, "token-a"):
            with pytest.raises(TierUnavailable, match="401"):
                request_json(made.url, path, body, auth_token=token)
    client = Client(made.socket, NAMESPACE, auth_token="token-a", connect_timeout_s=30.0)
    saved(client, RUN)
    mine = {"token_ids": TOKENS, "tenant": "team-a"}
    assert request_json(made.url, "/v1/pin", mine, auth_token="of the admin")["pinned"] == len(RUN)
    other = {"token_ids": TOKENS, "tenant": "team-b"}
    assert request_json(made.url, "/v1/pin", other, auth_token="of the admin")["pinned"] == 0
    client.close()
    assert made.stop() == 0


def test_the_commands(sidecar: ForkedSidecar, client: Client, tmp_path: Path) -> None:
    saved(client, RUN)
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(TOKENS))
    hashes = tmp_path / "hashes"
    hashes.write_text("\n".join(name.hex() for name in RUN))
    url = ("--url", sidecar.url)
    code, out, _ = run_command(tmp_path, "pin", "--token-ids", str(tokens), *url)
    assert (code, out) == (0, f"{len(RUN)} of {len(RUN)} blocks pinned\n")
    code, out, _ = run_command(tmp_path, "unpin", "--hashes", str(hashes), "--json", *url)
    assert (code, json.loads(out)) == (0, {"unpinned": len(RUN)})
    hashes.write_text("ab" * 32)
    code, out, _ = run_command(tmp_path, "pin", "--hashes", str(hashes), *url)
    assert code == 1
    assert "0 of 1 blocks pinned\nblock 0 of the prefix not loaded" in out
    code, out, _ = run_command(tmp_path, "warm", "--fraction", "0.01", *url)
    assert (code, out) == (0, "0 blocks loaded into L2\n")
    for wrong in (
        ("pin", *url),
        ("warm", *url),
        ("warm", "--prompts", str(tokens), *url),
        ("pin", "--token-ids", str(tmp_path / "none"), *url),
        ("pin", "--token-ids", str(tokens), "--url", "http://127.0.0.1:1"),
    ):
        code, out, err = run_command(tmp_path, *wrong)
        assert (code, out) == (2, "")
        assert err.startswith("kvstore: ")
        assert err.count("\n") == 1


def test_prompts_are_replayed_in_order_through_an_engines_api(tmp_path: Path) -> None:
    """The engine of this test only records its requests."""
    asked: list[tuple[str, Any]] = []

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "the-model"}]})

        def do_POST(self) -> None:
            asked.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))))
            )
            self.answer({"choices": []})

        def answer(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = f"http://127.0.0.1:{server.server_port}/v1"
        prompts = tmp_path / "prompts"
        prompts.write_text(
            '{"prompt": "once", "cache_salt": "s"}\n\n{"messages": [{"role": "user"}]}\n'
        )
        command = ("warm", "--prompts", str(prompts), "--engine", engine)
        code, out, _ = run_command(tmp_path, *command)
        assert (code, out) == (0, "2 prompts replayed\n")
        prompts.write_text('{"prompt": "once"}\n{"nothing": 1}\n')
        code, _, err = run_command(tmp_path, *command)
        assert code == 2
        assert "line 2" in err
        server.shutdown()
    base = {"model": "the-model", "max_tokens": 1, "stream": False}
    assert asked == [
        ("/v1/completions", {**base, "prompt": "once", "cache_salt": "s"}),
        ("/v1/chat/completions", {**base, "messages": [{"role": "user"}]}),
    ]
