"""`kvstore bench serve`: load for any OpenAI-compatible server, hits and misses told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.loadgen.endpoint import Endpoint, Outcome
    from kvstore.analysis.loadgen.run import Load, Ran
    from kvstore.analysis.loadgen.workloads import Session

EXIT_FAILED: Final = 1
SAMPLE_TOKENS: Final = 150
"""Length, in words, of the text that the server's tokenizer is sized up with."""
UNTOLD_TOKENS_PER_WORD: Final = 1.4
"""Where a server does not report how many tokens a prompt had: about that of English."""
MAX_REQUESTS: Final = 1_000_000


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    url: Annotated[str, typer.Option(help="The server's API, http://host:port/v1.")],
    model: Annotated[str, typer.Option(help="Its model; default: the first it lists.")] = "",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="chat, system-prompt, rag, agent, few-shot or sampling; again for more."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each workload.")] = 24,
    concurrency: Annotated[int, typer.Option(help="Sessions at once.")] = 4,
    rate: Annotated[
        float, typer.Option(help="Sessions that arrive per second; 0: as others end.")
    ] = 0.0,
    scale: Annotated[float, typer.Option(help="Multiplies the length of every text.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals; another one starts cold.")] = 0,
    replies: Annotated[
        str, typer.Option(help="Answers in the history: the server's own, or made ones.")
    ] = "server",
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length (an extension).")
    ] = False,
    api_key: Annotated[str, typer.Option(help="Where the server asks for one.")] = "",
    silence_s: Annotated[float, typer.Option(help="Longest silence of a stream.")] = 30.0,
    request_s: Annotated[float, typer.Option(help="Longest request.")] = 300.0,
    limit_s: Annotated[float, typer.Option(help="Longest run of one workload.")] = 600.0,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time to first token of hits and of misses, token hit rate and throughput of a server.

    Exits with 1 when a request failed.
    """
    from kvstore.analysis.loadgen.endpoint import Endpoint, Options
    from kvstore.analysis.loadgen.run import Load
    from kvstore.analysis.loadgen.show import draw, notes, show
    from kvstore.analysis.loadgen.workloads import chosen

    names = chosen(workload or [])
    _check(requests, scale, max_tokens, silence_s, request_s, limit_s)
    if png is not None:
        import matplotlib  # noqa: F401 - what cannot be drawn is said before it is measured
    load = Load(concurrency, rate, limit_s, replies, seed)
    load.check()
    options = Options(model, api, max_tokens, ignore_eos, silence_s, request_s, api_key)
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
    if png is not None:
        outcomes = [outcome for one in ran.values() for outcome in one.outcomes]
        title = f"{report['model']}, {concurrency} at once"
        draw(outcomes, title, png, split=report["split"])
    if report["faults"] or report["given_up"]:
        if as_json:
            for line in notes(report):
                typer.echo(f"kvstore: {line}", err=True)
        raise typer.Exit(EXIT_FAILED)


def _check(requests: int, scale: float, max_tokens: int, *seconds: float) -> None:
    if not 1 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests {requests}; 1 to {MAX_REQUESTS:,} is right")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"--scale {scale}; a number above 0 is right")
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens}; at least 1 is right")
    for value in seconds:
        if not 0 < value < float("inf"):
            raise ConfigError(f"a limit of {value} s; more than 0 is right")


def _meet(endpoint: Endpoint) -> tuple[Endpoint, int | None]:
    """The endpoint with its model named, and the tokens that model takes where it is told."""
    offered = endpoint.models()
    wanted = endpoint.options.model or offered[0]["id"]
    found = next((model for model in offered if model["id"] == wanted), None)
    if found is None:
        known = ", ".join(model["id"] for model in offered)
        raise ConfigError(f"{endpoint.url} has no model {wanted!r}; one of {known} is right")
    endpoint.options = replace(endpoint.options, model=wanted)
    room = found.get("max_model_len")
    return endpoint, room if isinstance(room, int) else None


def _tokens_per_word(endpoint: Endpoint, seed: int) -> float:
    """Of the server's tokenizer, from one small request. It must succeed: if this one does not,
    none will."""
    from kvstore.analysis.loadgen.endpoint import EndpointUnusable
    from kvstore.analysis.loadgen.workloads import Writer

    text = Writer(seed ^ 0x5EED, tokens_per_word=1.0).text(SAMPLE_TOKENS)
    outcome = endpoint.ask([{"role": "user", "content": text}], max_tokens=1)
    if outcome.fault:
        raise EndpointUnusable(
            f"{endpoint.url} fails at a first small request: {outcome.fault}: {outcome.detail}"
        )
    if outcome.usage is None or not outcome.usage.prompt_tokens:
        return UNTOLD_TOKENS_PER_WORD
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
    """Refuse a load whose longest prompt the model cannot take."""
    for name, sessions in plans.items():
        longest = max(s.tokens(per_word, endpoint.options.max_tokens) for s in sessions)
        if room is not None and longest > room:
            raise ConfigError(
                f"workload {name!r} has prompts of about {longest:,} tokens, and "
                f"{endpoint.options.model} takes {room:,}; a --scale of {0.9 * room / longest:.2f} "
                "of this one is right"
            )


def _run_all(endpoint: Endpoint, load: Load, plans: dict[str, list[Session]]) -> dict[str, Ran]:
    """One workload after another, under a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    from kvstore.analysis.loadgen.run import Run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    ran = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name, sessions in plans.items():
            task = progress.add_task(name, total=sum(len(s.turns) for s in sessions))

            def step(outcome: Outcome, task: Any = task) -> None:
                progress.advance(task)

            ran[name] = Run(endpoint, load, name, step).run(sessions)
    return ran


def _report(
    endpoint: Endpoint,
    load: Load,
    plans: dict[str, list[Session]],
    ran: dict[str, Ran],
    per_word: float,
) -> dict[str, Any]:
    from kvstore.analysis.loadgen.summary import faults_of, summary, tells_cached

    outcomes = [outcome for one in ran.values() for outcome in one.outcomes]
    split = tells_cached(outcomes)
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
        "replies": load.replies,
        "tokens_per_word": round(per_word, 3),
        "split": split,
        "rows": rows,
        "faults": faults_of(outcomes),
        "skipped": planned - len(outcomes),
        "late_sessions": sum(one.late for one in ran.values()),
        "given_up": list(dict.fromkeys(one.given_up for one in ran.values() if one.given_up)),
    }
