"""`kvstore bench serve` against kvstore's engine in a process, and against faulty servers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engine_rig import EngineProcess

from kvstore.analysis.loadgen.endpoint import Endpoint, Options, usage_of
from kvstore.analysis.loadgen.run import FAULTS_IN_A_ROW, Load, LoadRun
from kvstore.analysis.loadgen.summary import reports_cached, spread, summary
from kvstore.analysis.loadgen.workloads import WORKLOADS, Session, Turn, Writer
from kvstore.cli import main

SMALL = ["--scale", "0.1", "--max-tokens", "3", "--concurrency", "2"]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess() as running:
        yield running


Capture = pytest.CaptureFixture[str]


def bench(capfd: Capture, url: str, *options: str) -> tuple[int, Any, str]:
    """Return the exit code, the report (None: no output) and stderr."""
    code = main(["bench", "serve", "--url", url, "--json", *options])
    out, err = capfd.readouterr()
    return code, json.loads(out) if out else None, err


def error_line(err: str) -> str:
    """Return the only line of stderr."""
    assert err.count("\n") == 1, err
    return err.strip()


# ---- against the engine ----


def test_every_workload_is_measured_and_split(
    engine: EngineProcess, capfd: Capture, tmp_path: Path
) -> None:
    engine.reset()
    png = tmp_path / "deep" / "plot.png"
    code, report, _ = bench(capfd, engine.url, *SMALL, "--requests", "6", "--plot", str(png))
    assert code == 0
    assert (report["model"], report["split"], report["faults"]) == ("tiny", True, {})
    rows = {row["workload"]: row for row in report["rows"]}
    assert list(rows) == [*WORKLOADS, "all"]
    for name in WORKLOADS:
        row = rows[name]
        assert (row["requests"], row["failed"]) == (6, 0)
        assert row["completion_tokens"] <= 18
        assert 0 < row["cached_tokens"] < row["prompt_tokens"], name
        assert sum(row["cached_tokens_by_tier"].values()) == row["cached_tokens"]
        split = [row[f"ttft_{kind}_ms"] for kind in ("hit", "miss")]
        assert sum(part["n"] for part in split if part is not None) == 6
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["latency_ms"]["p99"]
    total = sum(rows[name]["prompt_tokens"] for name in WORKLOADS)
    assert rows["all"]["prompt_tokens"] == total
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_seed_repeats_its_prompts_and_another_starts_cold(
    engine: EngineProcess, capfd: Capture
) -> None:
    engine.reset()
    options = ["--workload", "sampling", "--requests", "8", *SMALL, "--concurrency", "1"]

    def row(seed: str) -> dict[str, Any]:
        _, report, _ = bench(capfd, engine.url, *options, "--seed", seed)
        found: dict[str, Any] = report["rows"][0]
        return found

    first, again, other = row("1"), row("1"), row("2")
    assert first["prompt_tokens"] == again["prompt_tokens"]
    assert again["cached_tokens"] > first["cached_tokens"]
    assert again["ttft_miss_ms"] is None
    assert other["ttft_miss_ms"]["n"] == 1  # The first of eight equal prompts.


def test_the_history_is_the_servers_own_or_synthetic(engine: EngineProcess, capfd: Capture) -> None:
    options = ["--workload", "chat", "--requests", "3", "--scale", "0.05", "--seed", "5"]
    _, own, _ = bench(capfd, engine.url, *options, "--max-tokens", "2")
    _, made, _ = bench(capfd, engine.url, *options, "--max-tokens", "2", "--history", "synthetic")
    assert made["rows"][0]["prompt_tokens"] > own["rows"][0]["prompt_tokens"]


def test_completions_at_a_rate(engine: EngineProcess, capfd: Capture) -> None:
    options = ["--workload", "few-shot", "--requests", "4", *SMALL, "--api", "completions"]
    code, report, _ = bench(capfd, engine.url, *options, "--rate", "50", "--ignore-eos")
    assert code == 0
    assert report["rows"][0]["completion_tokens"] == 12
    assert report["rate"] == 50


def test_the_printed_table_has_the_same(engine: EngineProcess, capfd: Capture) -> None:
    assert main(["bench", "serve", "--url", engine.url, "--workload", "rag", *SMALL]) == 0
    out = capfd.readouterr().out
    assert "rag" in out
    assert "%" in out
    assert "at least 50%" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "none"], ["'none'", "tiny"]),
        (["--scale", "9"], ["4,096", "--scale"]),
        (["--workload", "cat"], ["'cat'", "few-shot"]),
        (["--concurrency", "0"], ["--concurrency must", "1"]),
        (["--history", "none"], ["'none'", "synthetic"]),
        (["--api", "none"], ["'none'", "completions"]),
        (["--requests", "0"], ["--requests must"]),
        (["--idle-timeout", "0"], ["more than 0"]),
    ],
)
def test_an_invalid_option_is_one_line(
    engine: EngineProcess, capfd: Capture, options: list[str], words: list[str]
) -> None:
    code, report, err = bench(capfd, engine.url, *options)
    assert (code, report) == (2, None)
    assert [word for word in words if word not in error_line(err)] == []


# ---- against faulty servers ----


def event(text: str, **more: Any) -> bytes:
    part = {"choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(part).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = event("b", usage={"prompt_tokens": 10, "completion_tokens": 2})


class Scripted:
    """A server that lists one model and answers each request by `answer(handler, count)`."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler, int], None]) -> None:
        counter = iter(range(10_000))
        self.ending = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                plain(self, 200, {"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self, next(counter))

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def plain(handler: BaseHTTPRequestHandler, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def stream(handler: BaseHTTPRequestHandler, *parts: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)
        handler.wfile.flush()


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[..., None]], str]]:
    running: list[Scripted] = []

    def start(answer: Callable[..., None]) -> str:
        running.append(Scripted(answer))
        return running[-1].url

    yield start
    for server in running:
        server.close()


def fine(handler: BaseHTTPRequestHandler) -> None:
    stream(handler, event("a"), USAGE, DONE)


def stall(handler: BaseHTTPRequestHandler) -> None:
    stream(handler, event("a"))
    time.sleep(1.0)


def trickle(handler: BaseHTTPRequestHandler) -> None:
    stream(handler)
    for _ in range(200):  # One byte at a time: never idle, never done.
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.02)


FAULTS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "HTTP 429": lambda handler: plain(handler, 429, {"error": {"message": "too many"}}),
    "stalled": stall,
    "too slow": trickle,
    "cut off": lambda handler: stream(handler, event("a")),
    "invalid event stream": lambda handler: stream(handler, b"data: {half\n\n"),
    "error in stream": lambda handler: stream(handler, b'data: {"error": "dead"}\n\n'),
    "no tokens": lambda handler: stream(handler, DONE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_counted_by_its_kind(
    fault: str, scripted: Callable[..., str], capfd: Capture
) -> None:
    def answer(handler: BaseHTTPRequestHandler, count: int) -> None:
        # The first request is the sample. After it every other request fails.
        (FAULTS[fault] if count % 2 else fine)(handler)

    options = ["--workload", "system-prompt", "--requests", "6", "--concurrency", "1"]
    limits = ["--idle-timeout", "0.3", "--request-timeout", "0.6"]
    code, report, err = bench(capfd, scripted(answer), *options, *limits)
    assert code == 1
    assert report["faults"][fault]["count"] == 3
    assert (report["rows"][0]["requests"], report["rows"][0]["failed"]) == (6, 3)
    assert report["split"] is False
    assert report["rows"][0]["token_hit_rate"] is None
    assert fault in err


def test_a_server_that_dies_ends_the_run(scripted: Callable[..., str], capfd: Capture) -> None:
    def answer(handler: BaseHTTPRequestHandler, count: int) -> None:
        (fine if count == 0 else FAULTS["HTTP 429"])(handler)

    options = ["--workload", "sampling", "--requests", "500", "--concurrency", "1"]
    code, report, _ = bench(capfd, scripted(answer), *options)
    assert code == 1
    assert report["rows"][0]["requests"] == FAULTS_IN_A_ROW
    assert report["skipped"] == 500 - FAULTS_IN_A_ROW
    assert "too many" in report["aborted"][0]


def test_a_dead_endpoint_is_one_line(capfd: Capture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        code, report, err = bench(capfd, url)
    assert (code, report) == (2, None)
    assert url in error_line(err)


def test_a_server_that_rejects_the_first_request_is_one_line(
    scripted: Callable[..., str], capfd: Capture
) -> None:
    url = scripted(lambda handler, _: plain(handler, 401, {"error": {"message": "who are you"}}))
    code, _, err = bench(capfd, url)
    assert code == 2
    assert "HTTP 401: who are you" in error_line(err)


def test_a_server_that_never_answers_is_one_line(capfd: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        code, _, err = bench(capfd, url, "--idle-timeout", "0.3")
    assert code == 2
    assert "timed out" in error_line(err)


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:1"])
def test_an_invalid_address(url: str, capfd: Capture) -> None:
    code, _, err = bench(capfd, url)
    assert code == 2
    assert url in error_line(err)


# ---- parts ----


def test_the_maximum_duration_ends_a_run(scripted: Callable[..., str]) -> None:
    def slow(handler: BaseHTTPRequestHandler, count: int) -> None:
        time.sleep(0.1)
        fine(handler)

    endpoint = Endpoint(scripted(slow), Options(model="m"))
    session = Session((Turn(({"role": "user", "content": "hello"},), ""),))
    done: list[Any] = []
    load = Load(concurrency=1, max_duration_s=0.3)
    ran = LoadRun(endpoint, load, "x", done.append).run([session] * 1000)
    endpoint.close()
    assert "--max-duration" in ran.aborted
    assert 0 < len(done) == len(ran.outcomes) < 1000


def test_sessions_that_wait_for_a_thread_are_late(scripted: Callable[..., str]) -> None:
    def slow(handler: BaseHTTPRequestHandler, count: int) -> None:
        time.sleep(0.2)
        fine(handler)

    endpoint = Endpoint(scripted(slow), Options(model="m"))
    session = Session((Turn(({"role": "user", "content": "hello"},), ""),))
    load = Load(concurrency=1, rate=1000.0)
    ran = LoadRun(endpoint, load, "x", lambda _: None).run([session] * 5)
    endpoint.close()
    assert ran.late_sessions == 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_the_requested_number_of_requests_and_repeats(name: str) -> None:
    for count in (1, 7, 24):
        sessions = WORKLOADS[name](Writer(3), count)
        assert sum(len(session.turns) for session in sessions) == count
        assert sessions == WORKLOADS[name](Writer(3), count)
    assert WORKLOADS[name](Writer(3), 8) != WORKLOADS[name](Writer(4), 8)


def test_texts_have_about_the_requested_number_of_tokens() -> None:
    for per_word in (1.0, 1.3, 7.0):
        words = len(Writer(0, 2.0, per_word).text(700).split())
        assert words == pytest.approx(1400 / per_word, abs=1)


@pytest.mark.parametrize(
    ("reported", "cached"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {"audio_tokens": 0}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
    ],
)
def test_cached_tokens_are_reported_or_not(reported: dict[str, Any], cached: int | None) -> None:
    assert usage_of({"prompt_tokens": 9, **reported}).cached_tokens == cached


def test_no_values_have_no_spread() -> None:
    assert spread([]) is None
    assert summary("x", [], 1.0, split=True)["ttft_hit_ms"] is None
    assert not reports_cached([])
