"""Observability of a sidecar: metrics by Prometheus' rules, request ids, log lines, traces."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidecar_rig import (
    LIMIT_S,
    NAMESPACE,
    SLOT_BYTES,
    ForkedSidecar,
    disk,
    get,
    hashes_of,
    match,
    put,
    run_command,
    wait_until,
)

from kvstore.blocks.key import Namespace
from kvstore.errors import ConfigError
from kvstore.ipc.client import Client

TOKENS = {"token-a": "team-a", "token-b": "team-b"}


def patient(socket: str, namespace: Namespace, **about: Any) -> Client:
    """A client with timeouts long enough for a busy machine."""
    return Client(socket, namespace, response_timeout_s=LIMIT_S, **about)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    folder = tmp_path_factory.mktemp("observed")
    made = ForkedSidecar(folder, {**disk(folder / "disk"), "server": {"auth_tokens": TOKENS}})
    yield made
    assert made.stop() == 0


def fetch(
    sidecar: ForkedSidecar, path: str, headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def samples_of(sidecar: ForkedSidecar) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetch(sidecar, "/metrics")[1])
        for sample in family.samples
    }


def test_promtool_accepts_the_metrics(sidecar: ForkedSidecar) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package prometheus brings it")
    with patient(sidecar.socket, NAMESPACE, auth_token="token-a") as client:
        put(client, hashes_of("lint", 4))
    text = fetch(sidecar, "/metrics")[1]
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tokens_by_tenant_traffic_label_and_tier(sidecar: ForkedSidecar) -> None:
    before = samples_of(sidecar)
    run = hashes_of("routed", 6)
    tokens = NAMESPACE.block_tokens
    with (
        patient(sidecar.socket, NAMESPACE, auth_token="token-a", traffic_label="chat") as chat,
        patient(sidecar.socket, NAMESPACE, auth_token="token-b", traffic_label="rag") as rag,
    ):
        assert match(chat, run) == []
        put(chat, run[:4])
        assert len(match(chat, run)) == 4
        get(chat, run[:4])
        assert match(rag, run) == []  # another tenant's
        # A lookup answered by the shared index is reported with the client's next message.
        put(rag, hashes_of("of another run", 1))
        assert rag.sync(10.0)  # its commit has no answer
        now = samples_of(sidecar)

    def grown(name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        return now[key] - before.get(key, 0)

    chat_is, rag_is = (
        {"tenant": "team-a", "traffic": "chat"},
        {"tenant": "team-b", "traffic": "rag"},
    )
    # The first prefix is looked up twice before a load, so it counts once. `get` looks up its own.
    assert grown("kvstore_lookup_tokens_total", **chat_is) == (6 + 4) * tokens
    assert grown("kvstore_hit_tokens_total", **chat_is, tier="l2") == 4 * tokens
    assert grown("kvstore_hit_tokens_total", **chat_is, tier="disk") == 0
    assert grown("kvstore_saved_tokens_total", **chat_is) == 4 * tokens
    assert grown("kvstore_lookup_tokens_total", **rag_is) == 6 * tokens
    assert grown("kvstore_hit_tokens_total", **rag_is, tier="l2") == 0
    assert grown("kvstore_hit_bytes_total", tier="l2") == 4 * SLOT_BYTES
    assert grown("kvstore_saved_bytes_total") == 5 * SLOT_BYTES
    assert grown("kvstore_load_seconds_count") == 1


def test_a_tier_is_timed_by_operation(sidecar: ForkedSidecar) -> None:
    with patient(sidecar.socket, NAMESPACE, auth_token="token-a") as client:
        put(client, hashes_of("timed", 8))

    def written() -> bool:
        now = samples_of(sidecar)
        count = now["kvstore_tier_operation_seconds_count", ("op", "write"), ("tier", "disk")]
        return (
            count >= 8
            and now["kvstore_tier_transfers_total", ("direction", "write"), ("tier", "disk")]
            == count
        )

    wait_until(written, "eight timed writes")


def test_no_label_names_a_client(sidecar: ForkedSidecar) -> None:
    for number in range(3):
        with patient(sidecar.socket, NAMESPACE, auth_token="token-a", name=f"unheard {number}"):
            pass
    names = {key[0] for key in samples_of(sidecar)}
    labels = {label for key in samples_of(sidecar) for label, _ in key[1:]}
    assert "kvstore_client_operations_in_flight" in names
    assert "unheard" not in fetch(sidecar, "/metrics")[1]
    assert labels == {
        "codec", "direction", "le", "method", "namespace", "op", "path", "result", "state",
        "status", "tenant", "tier", "traffic", "version",
    }  # fmt: skip


def test_an_invalid_traffic_label_is_rejected(sidecar: ForkedSidecar) -> None:
    with pytest.raises(ConfigError, match="traffic label"):
        patient(sidecar.socket, NAMESPACE, auth_token="token-a", traffic_label="no route")


def test_unknown_paths_are_one_row(sidecar: ForkedSidecar) -> None:
    for number in range(5):
        assert fetch(sidecar, f"/made/up/{number}")[0].status == 404
    key = "kvstore_http_requests_total", ("method", "GET"), ("path", "(none)"), ("status", "404")
    assert samples_of(sidecar)[key] >= 5
    assert not any("/made/up" in str(key) for key in samples_of(sidecar))


def test_request_ids_are_returned_and_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sidecar = ForkedSidecar(tmp_path, {"log": {"format": "json", "level": "debug"}}, stderr=log)
    try:
        given = fetch(sidecar, "/v1/stats", {"X-Request-Id": "from-outside.1"})[0]
        assert given.getheader("x-request-id") == "from-outside.1"
        made = fetch(sidecar, "/v1/none", {"X-Request-Id": "no id\tat all"})[0]
        wait_until(lambda: log.read_text().count('"event": "request"') >= 2, "two lines")
    finally:
        assert sidecar.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    by_id = {line["request_id"]: line for line in lines if line["event"] == "request"}
    first = by_id["from-outside.1"]
    assert (first["method"], first["path"], first["status"]) == ("GET", "/v1/stats", 200)
    assert first["ms"] > 0
    second = by_id[made.getheader("x-request-id") or ""]
    assert second["status"] == 404


def test_an_unknown_log_format_is_one_line(tmp_path: Path) -> None:
    code, _, err = run_command(tmp_path, "serve", "--log-format", "xml")
    assert code == 2
    assert err.startswith("kvstore: log.format = 'xml'")
    assert err.count("\n") == 1


class Collector(ThreadingHTTPServer):
    """Accepts OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), Taking)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        assert isinstance(self.server, Collector)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_traces(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    collector = Collector()
    sidecar = ForkedSidecar(
        tmp_path, {**disk(tmp_path / "disk"), "trace": {"endpoint": collector.url}}
    )
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with patient(sidecar.socket, NAMESPACE) as client:
        put(client, hashes_of("traced", 2))
        get(client, hashes_of("traced", 2))
        fetch(sidecar, "/v1/stats", {"traceparent": parent, "X-Request-Id": "traced-1"})
    assert sidecar.stop() == 0  # sends the queued spans
    [request] = collector.named("GET /v1/stats")
    assert request.trace_id.hex() == "ab" * 16
    assert request.parent_span_id.hex() == "cd" * 8
    about = {each.key: each.value for each in request.attributes}
    assert about["request_id"].string_value == "traced-1"
    assert about["http.response.status_code"].int_value == 200
    assert collector.named("request load")
    assert collector.named("request save")
    written = collector.named("tier write")
    assert len(written) == 2
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in written)
    collector.shutdown()


def test_an_unreachable_collector_blocks_nothing(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    sidecar = ForkedSidecar(tmp_path, {"trace": {"endpoint": "http://127.0.0.1:9"}})
    with patient(sidecar.socket, NAMESPACE) as client:
        put(client, hashes_of("untraced", 4))
        assert get(client, hashes_of("untraced", 4))[1] == ["l2"] * 4
    assert sidecar.stop() == 0


def test_an_invalid_endpoint_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text('[trace]\nendpoint = "collector:4318"\n')
    code, _, err = run_command(
        tmp_path, "serve", "--config", str(config), "--socket", str(tmp_path / "s"), "--port", "0"
    )
    assert code == 2
    assert err.startswith("kvstore: trace.endpoint = 'collector:4318' must be an HTTP URL")


def test_a_client_that_disconnects_in_its_request_is_not_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sidecar = ForkedSidecar(tmp_path, stderr=log)
    with socket.create_connection(
        (urlsplit(sidecar.url).hostname, urlsplit(sidecar.url).port)
    ) as end:
        head = "POST /v1/contains HTTP/1.1\r\nhost: kvstore\r\ncontent-length: 100\r\n\r\n"
        end.sendall(head.encode() + b'{"namespace"')
    key = "kvstore_http_requests_total", ("method", "POST"), ("path", "/v1/contains")
    wait_until(lambda: samples_of(sidecar).get((*key, ("status", "499"))) == 1, "it is counted")
    assert samples_of(sidecar).get((*key, ("status", "500"))) is None
    assert sidecar.stop() == 0
    assert "Traceback" not in log.read_text()


def test_the_documentation_names_every_metric_and_no_other(sidecar: ForkedSidecar) -> None:
    from kvstore.engine.meters import COUNTERS, GAUGES

    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    named = set(re.findall(r"`(kvstore_[a-z0-9_]+)`", page))
    with patient(sidecar.socket, NAMESPACE, auth_token="token-a") as client:
        put(client, hashes_of("documented", 4))
        wait_until(
            lambda: any(key[0] == "kvstore_codec_ratio" for key in samples_of(sidecar)), "a codec"
        )
        families = text_string_to_metric_families(fetch(sidecar, "/metrics")[1])
        told = {
            each.name + ("_total" if each.type == "counter" else "")
            for each in families
            if each.name.startswith("kvstore_")
        }
    engine = {name for name in named if name.startswith("kvstore_engine_")}
    # Only some tiers have these.
    assert named - engine - told <= {"kvstore_tier_quota_evictions_total"}
    assert told - named == set()
    assert {f"kvstore_engine_{name}_total" for name in COUNTERS} <= engine
    assert {f"kvstore_engine_{name.removesuffix('_total')}" for name in GAUGES} <= engine
