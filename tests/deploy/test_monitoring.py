"""Prometheus rules by promtool; and a real Prometheus that scrapes a real sidecar and engine under
load: every panel of the Grafana dashboards must have data."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.processes import free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
LIMIT_S = 120.0
"""A timeout that only a hang exceeds."""
RATE = "20s"
"""The window of rates, in place of Grafana's."""

pytestmark = pytest.mark.prometheus


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*words: str) -> None:
    done = subprocess.run(
        [program("promtool"), *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", str(RULES / "kvstore.rules.yml"))
    promtool("check", "config", str(RULES / "prometheus.yml"))


def test_rules_pass_their_promtool_tests() -> None:
    promtool("test", "rules", str(RULES / "tests" / "kvstore.test.yml"))


def test_every_alert_has_a_test() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (RULES / "kvstore.rules.yml").read_text()))
    tested = set(
        re.findall(r"alertname: (\w+)", (RULES / "tests" / "kvstore.test.yml").read_text())
    )
    assert alerts == tested


def panels() -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel, expression) of every panel."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield file.stem, panel["title"], target["expr"]


def test_dashboards_are_valid() -> None:
    assert len(DASHBOARDS) == 2
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        assert board["uid"] == file.stem
        boxes = [panel["gridPos"] for panel in board["panels"]]
        assert all(0 < box["w"] <= 24 - box["x"] for box in boxes)
        places = [(box["x"] + x, box["y"] + y) for box in boxes for x in range(box["w"])
                  for y in range(box["h"])]  # fmt: skip
        assert len(places) == len(set(places)), "two panels overlap"
        names = {each["name"] for each in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
        assert used <= names | {"__rate_interval"}
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


class Stack:
    """A sidecar, an engine and a Prometheus, each in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("sidecar", "engine", "prometheus")}
        self._processes: list[subprocess.Popen[bytes]] = []
        kvstore = [sys.executable, "-m", "kvstore"]
        socket = str(folder / "kv.sock")
        # L2 is small, so that repeated prompts are loaded from disk.
        self._run("sidecar", [
            *kvstore, "serve", "--socket", socket, "--port", str(self.ports["sidecar"]),
            "--l2", "2MiB", "--slot-bytes", "64KiB", "--disk", str(folder / "disk"),
            "--disk-capacity", "64MiB", "--codec", "byteshuffle-zstd",
        ])  # fmt: skip
        self._run("engine", [
            *kvstore, "engine", "--model", "random", "--model-name", "m", "--port",
            str(self.ports["engine"]), "--store", socket, "--store-connect-timeout", "60s",
            "--num-pages", "96", "--threads", "1", "--traffic-label", "all",
            "--min-load-tokens", "0",
        ])  # fmt: skip
        self._scrape()
        wait_until(lambda: get(self.url("engine", "/health")), "the engine")
        wait_until(lambda: get(self.url("prometheus", "/-/ready")), "Prometheus")

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of a query now."""
        words = urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(self.url("prometheus", f"/api/v1/query?{words}")))
        assert answer["status"] == "success"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def request(self, prompt: str, traffic_label: str) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 2}
        call = urllib.request.Request(
            self.url("engine", "/v1/completions"),
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "X-KVStore-Traffic-Label": traffic_label},
        )
        with urllib.request.urlopen(call, timeout=LIMIT_S) as answer:
            assert answer.status == 200

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
            process.kill()

    def _run(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self._processes.append(process)

    def _scrape(self) -> None:
        """Start Prometheus with the job names of deploy/prometheus, scraping every second."""
        config = self.folder / "prometheus.yml"
        jobs = [
            {"job_name": f"kvstore-{name}",
             "static_configs": [{"targets": [f"127.0.0.1:{self.ports[name]}"]}]}
            for name in ("sidecar", "engine")
        ]  # fmt: skip
        config.write_text(json.dumps({  # JSON is YAML
            "global": dict.fromkeys(
                ("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s"
            ),
            "rule_files": [str(RULES / "kvstore.rules.yml")],
            "scrape_configs": jobs,
        }))  # fmt: skip
        self._run("prometheus", [
            program("prometheus"), f"--config.file={config}",
            f"--storage.tsdb.path={self.folder / 'series'}",
            f"--web.listen-address=127.0.0.1:{self.ports['prometheus']}",
        ])  # fmt: skip


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        body: bytes = answer.read()
        return body or b"answered"


def wait_until(true: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with suppress(OSError, urllib.error.URLError):
            if true():
                return
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    program("prometheus")
    pytest.importorskip("torch", reason="the engine needs torch")
    made = Stack(tmp_path_factory.mktemp("stack"))
    stop = threading.Event()

    def load() -> None:
        """Repeat prompts that L2 has evicted, and send some new ones."""
        number = 0
        while not stop.is_set():
            text = f"{number % 14} is a prompt that comes again and again, and is long. " * 5
            made.request(text, ("chat", "rag")[number % 2])
            made.request(f"{number} new {number} words {number} " * 3, "chat")
            number += 1

    worker = threading.Thread(target=load, daemon=True)
    worker.start()
    try:
        wait_until(lambda: hit_from_disk(made), "a block was loaded from disk")
        time.sleep(float(RATE.rstrip("s")) / 2)  # rates need some scrapes
        yield made
    finally:
        stop.set()
        worker.join(LIMIT_S)
        made.close()


def hit_from_disk(stack: Stack) -> bool:
    found = stack.query('kvstore_hit_bytes_total{tier="disk"}')
    return bool(found) and float(found[0]["value"][1]) > 0


def fill_in(expression: str) -> str:
    """The expression with values for Grafana's variables."""
    filled = expression.replace("$__rate_interval", RATE)
    return re.sub(r"\$(instance|tenant)", ".*", filled)


@pytest.mark.slow
def test_every_panel_has_data(stack: Stack) -> None:
    expressions = list(panels())
    assert len(expressions) > 60
    empty = dict.fromkeys((f"{board}: {title}", expr) for board, title, expr in expressions)
    deadline = time.monotonic() + 60.0

    def still_empty() -> list[tuple[str, str]]:
        left = []
        for name, expression in empty:
            values = [float(row["value"][1]) for row in stack.query(fill_in(expression))]
            if not any(value == value for value in values):  # NaN is not data
                left.append((name, expression))
        return left

    left = still_empty()
    while left and time.monotonic() < deadline:
        time.sleep(1.0)
        empty = dict.fromkeys(left)
        left = still_empty()
    assert left == []


@pytest.mark.slow
def test_dashboard_variables_have_values(stack: Stack) -> None:
    for file in DASHBOARDS:
        for each in json.loads(file.read_text())["templating"]["list"]:
            if each["type"] == "query":
                metric, label = re.fullmatch(
                    r"label_values\((\w+), (\w+)\)", each["query"]["query"]
                ).groups()  # type: ignore[union-attr]
                assert all(row["metric"].get(label) for row in stack.query(metric))
                assert stack.query(metric)


@pytest.mark.slow
def test_rules_are_evaluated_and_no_alert_fires(stack: Stack) -> None:
    wait_until(lambda: stack.query("instance:kvstore_hit_rate:ratio_rate5m"), "a recorded ratio")
    groups = json.loads(get(stack.url("prometheus", "/api/v1/rules")))["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert stack.query('ALERTS{severity="critical"}') == []


@pytest.mark.slow
def test_promtool_accepts_the_engines_metrics(stack: Stack) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=get(stack.url("engine", "/metrics")),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
