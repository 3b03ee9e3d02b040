"""`kvstore bench serve`: generates load for an OpenAI-compatible server; separates hits, misses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.loadgen.endpoint import Endpoint, Outcome
    from kvstore.analysis.loadgen.run import Load, RunResult
    from kvstore.analysis.loadgen.workloads import Session

EXIT_FAILED: Final = 1
SAMPLE_TOKENS: Final = 150
"""Length, in words, of the text used to measure the server's tokenizer."""
DEFAULT_TOKENS_PER_WORD: Final = 1.4
"""Used if a server does not report prompt tokens. About the ratio of English text."""
MAX_REQUESTS: Final = 1_000_000


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    url: Annotated[str, typer.Option(help="URL of the server's API, http://host:port/v1.")],
    model: Annotated[
        str, typer.Option(help="Name of the model. Default: the first that the server lists.")
    ] = "",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Workload: chat, system-prompt, rag, agent, few-shot or sampling. Repeatable. "
            "Default: all."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Number of requests per workload.")] = 24,
    concurrency: Annotated[int, typer.Option(help="Maximum concurrent sessions.")] = 4,
    rate: Annotated[
        float,
        typer.Option(
            help="Sessions that arrive per second. 0: a session starts when another ends."
        ),
    ] = 0.0,
    scale: Annotated[float, typer.Option(help="Factor for the length of every text.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 32,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of prompts and arrivals. A new seed makes new prompts (cold cache)."
        ),
    ] = 0,
    history: Annotated[
        str,
        typer.Option(
            help="Source of the assistant turns in the history: server (real replies) or synthetic."
        ),
    ] = "server",
    api: Annotated[str, typer.Option(help="API to use: chat or completions.")] = "chat",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Request answers of full length (an extension of the API)."
        ),
    ] = False,
    api_key: Annotated[str, typer.Option(help="API key, if the server requires one.")] = "",
    idle_timeout: Annotated[
        str,
        typer.Option(help="Maximum pause in a stream, such as 30s. A bare number is seconds."),
    ] = "30s",
    request_timeout: Annotated[
        str, typer.Option(help="Maximum duration of a request. A bare number is seconds.")
    ] = "5m",
    max_duration: Annotated[
        str, typer.Option(help="Maximum duration of one workload. A bare number is seconds.")
    ] = "10m",
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot to this file, such as out.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure time to first token of hits and misses, token hit rate and throughput of a server.

    Exits with 1 if a request failed.
    """
    from kvstore.analysis.loadgen.endpoint import Endpoint, Options
    from kvstore.analysis.loadgen.run import Load
    from kvstore.analysis.loadgen.show import notes, plot, show
    from kvstore.analysis.loadgen.workloads import parse_workloads

    names = parse_workloads(workload or [])
    _check(requests, scale, max_tokens)
    idle_s = _positive_s("--idle-timeout", idle_timeout)
    request_s = _positive_s("--request-timeout", request_timeout)
    duration_s = _positive_s("--max-duration", max_duration)
    if plot_path is not None:
        import matplotlib  # noqa: F401 - fail before the measurement, not after it
    load = Load(concurrency, rate, duration_s, history, seed)
    load.check()
    options = Options(model, api, max_tokens, ignore_eos, idle_s, request_s, api_key)
    endpoint = Endpoint(url, options, connections=concurrency)
    try:
        endpoint, room = _meet(endpoint)
        per_word = _tokens_per_word(endpoint, seed)
        plans = _plans(names, requests, scale, seed, per_word)
        _check_room(plans, room, per_word, endpoint)
        ran = _run_all(endpoint, load, plans)
    finally:
        endpoint.close()
    report = _report(endpoint, load, plans, ran, per_word)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)
    if plot_path is not None:
        outcomes = [outcome for one in ran.values() for outcome in one.outcomes]
        title = f"{report['model']}, concurrency {concurrency}"
        plot(outcomes, title, plot_path, split=report["split"])
    if report["faults"] or report["aborted"]:
        if as_json:
            for line in notes(report):
                typer.echo(f"kvstore: {line}", err=True)
        raise typer.Exit(EXIT_FAILED)


def _check(requests: int, scale: float, max_tokens: int) -> None:
    if not 1 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests must be 1 to {MAX_REQUESTS:,} (got {requests})")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"--scale must be more than 0 (got {scale})")
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1 (got {max_tokens})")


def _positive_s(flag: str, text: str) -> float:
    """Parse a positive duration. A bare number is seconds. Raises ConfigError if it is not."""
    from kvstore.cli.common.durations import seconds_of

    seconds = seconds_of(flag, text)
    if not seconds:
        raise ConfigError(f"{flag} must be more than 0 (got {text!r})")
    return seconds


def _meet(endpoint: Endpoint) -> tuple[Endpoint, int | None]:
    """Return the endpoint with its model set, and the model's context length if reported."""
    offered = endpoint.models()
    wanted = endpoint.options.model or offered[0]["id"]
    found = next((model for model in offered if model["id"] == wanted), None)
    if found is None:
        known = ", ".join(model["id"] for model in offered)
        raise ConfigError(f"{endpoint.url} has no model {wanted!r}; use {known}")
    endpoint.options = replace(endpoint.options, model=wanted)
    room = found.get("max_model_len")
    return endpoint, room if isinstance(room, int) else None


def _tokens_per_word(endpoint: Endpoint, seed: int) -> float:
    """Measure the server's tokenizer with one small request.

    Raises EndpointUnusable if the request fails, because all others would fail too.
    """
    from kvstore.analysis.loadgen.endpoint import EndpointUnusable
    from kvstore.analysis.loadgen.workloads import Writer

    text = Writer(seed ^ 0x5EED, tokens_per_word=1.0).text(SAMPLE_TOKENS)
    outcome = endpoint.send([{"role": "user", "content": text}], max_tokens=1)
    if outcome.fault:
        raise EndpointUnusable(
            f"{endpoint.url}: the first small request failed: {outcome.fault}: {outcome.detail}"
        )
    if outcome.usage is None or not outcome.usage.prompt_tokens:
        return DEFAULT_TOKENS_PER_WORD
    return outcome.usage.prompt_tokens / SAMPLE_TOKENS


def _plans(
    names: list[str], requests: int, scale: float, seed: int, per_word: float
) -> dict[str, list[Session]]:
    from kvstore.analysis.loadgen.workloads import WORKLOADS, Writer

    return {
        name: WORKLOADS[name](Writer(seed * len(WORKLOADS) + number, scale, per_word), requests)
        for number, name in enumerate(WORKLOADS)
        if name in names
    }


def _check_room(
    plans: dict[str, list[Session]], room: int | None, per_word: float, endpoint: Endpoint
) -> None:
    """Raise ConfigError if the longest prompt does not fit into the model's context."""
    for name, sessions in plans.items():
        longest = max(s.tokens(per_word, endpoint.options.max_tokens) for s in sessions)
        if room is not None and longest > room:
            raise ConfigError(
                f"workload {name!r} has prompts of about {longest:,} tokens, but "
                f"{endpoint.options.model} accepts {room:,}; use a --scale that is "
                f"{0.9 * room / longest:.2f} of the current one"
            )


def _run_all(
    endpoint: Endpoint, load: Load, plans: dict[str, list[Session]]
) -> dict[str, RunResult]:
    """Run the workloads one after another, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    from kvstore.analysis.loadgen.run import LoadRun

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    ran = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name, sessions in plans.items():
            task = progress.add_task(name, total=sum(len(s.turns) for s in sessions))

            def step(outcome: Outcome, task: Any = task) -> None:
                progress.advance(task)

            ran[name] = LoadRun(endpoint, load, name, step).run(sessions)
    return ran


def _report(
    endpoint: Endpoint,
    load: Load,
    plans: dict[str, list[Session]],
    ran: dict[str, RunResult],
    per_word: float,
) -> dict[str, Any]:
    from kvstore.analysis.loadgen.summary import faults_of, reports_cached, summary

    outcomes = [outcome for one in ran.values() for outcome in one.outcomes]
    split = reports_cached(outcomes)
    rows = [summary(name, one.outcomes, one.wall_s, split=split) for name, one in ran.items()]
    if len(rows) > 1:
        wall_s = sum(one.wall_s for one in ran.values())
        rows.append(summary("all", outcomes, wall_s, split=split))
    planned = sum(len(session.turns) for sessions in plans.values() for session in sessions)
    return {
        "url": endpoint.url,
        "model": endpoint.options.model,
        "seed": load.seed,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "history": load.history,
        "tokens_per_word": round(per_word, 3),
        "split": split,
        "rows": rows,
        "faults": faults_of(outcomes),
        "skipped": planned - len(outcomes),
        "late_sessions": sum(one.late_sessions for one in ran.values()),
        "aborted": list(dict.fromkeys(one.aborted for one in ran.values() if one.aborted)),
    }
