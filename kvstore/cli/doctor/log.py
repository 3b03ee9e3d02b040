"""`kvstore doctor log`: what prevents cache hits of the requests in a log, by cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.diagnose.log import Cause, LogAnalyzer

CAUSES_SHOWN: Final = 8
GAP: Final = 0.05
"""Difference to an unlimited cache's hit rate above which something else costs hits."""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def log(
        file: Annotated[
            Path, typer.Argument(help="Request log: OpenAI API requests, one JSON object per line.")
        ],
        tokenizer: Annotated[
            str | None,
            typer.Option(help="Tokenizer: a folder with tokenizer.json, a .gguf file, or smollm2."),
        ] = None,
        block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        requests_per_day: Annotated[
            float | None, typer.Option(help="Requests per day. Default: the log's own rate.")
        ] = None,
        limit: Annotated[int, typer.Option(help="Maximum number of requests to read.")] = 100_000,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Report how many tokens in a request log could be cache hits, and why others are not."""
        from kvstore.cli.common.prompt_diff import check_sizes, counted_by, reader_of

        check_sizes(block_tokens, requests_per_day)
        if limit < 1:
            raise ConfigError(f"--limit must be at least 1 (got {limit})")
        reader = reader_of(tokenizer)
        analyzer, more = _read(reader.log(file), file, block_tokens, limit)
        if not analyzer.requests:
            raise ConfigError(f"{str(file)!r} has no requests")
        report = _report(analyzer, requests_per_day, exact=bool(tokenizer), more=more)
        if as_json:
            print(json.dumps(report))
        else:
            _show(report, counted_by(bool(tokenizer)))


def _read(prompts: Any, file: Path, block_tokens: int, limit: int) -> tuple[LogAnalyzer, bool]:
    """Return the analyzer after all requests, and whether the log is longer than the limit."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.analysis.diagnose.log import LogAnalyzer

    analyzer = LogAnalyzer(block_tokens)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        size = file.stat().st_size if file.is_file() else None
        task = progress.add_task("reading", total=size)
        for prompt in prompts:
            if analyzer.requests >= limit:
                return analyzer, True
            analyzer.add(prompt)
            progress.advance(task, len(prompt.text))
    return analyzer, False


def _report(
    analyzer: LogAnalyzer, requests_per_day: float | None, *, exact: bool, more: bool
) -> dict[str, Any]:
    reported = analyzer.reported_tokens
    return {
        "requests": analyzer.requests,
        "more_not_read": more,
        "exact": exact,
        "block_tokens": analyzer.block_tokens,
        "prompt_tokens": analyzer.tokens,
        "reusable_tokens": analyzer.reusable,
        "reusable_rate": round(analyzer.reusable / max(1, analyzer.tokens), 4),
        "reported_hit_rate": round(analyzer.cached_tokens / reported, 4) if reported else None,
        "lost_tokens": analyzer.lost,
        "lost_tokens_per_day": analyzer.per_day(analyzer.lost, requests_per_day),
        "partial_block_tokens": analyzer.partial,
        "span_s": round(analyzer.span_s, 3),
        "causes": [_row(cause, analyzer, requests_per_day) for cause in analyzer.worst_first()],
    }


def _row(cause: Cause, analyzer: LogAnalyzer, requests_per_day: float | None) -> dict[str, Any]:
    from kvstore.cli.common.prompt_diff import comparison_row

    assert cause.worst is not None
    return {
        "kind": cause.kind,
        "part": cause.part,
        "requests": cause.requests,
        "lost_tokens": cause.tokens,
        "lost_tokens_per_day": analyzer.per_day(cause.tokens, requests_per_day),
        "example": comparison_row(cause.worst),
    }


def _show(report: dict[str, Any], counted: str) -> None:
    tokens = max(1, report["prompt_tokens"])
    print(
        f"{report['requests']:,} requests, {report['prompt_tokens']:,} prompt tokens. An unlimited "
        f"cache would reuse {report['reusable_rate']:.1%} of them. Another "
        f"{report['lost_tokens']:,} tokens ({report['lost_tokens'] / tokens:.1%}) were in an "
        "earlier prompt, but in another place."
    )
    reported = report["reported_hit_rate"]
    if reported is not None:
        print(f"The server reported a hit rate of {reported:.1%}.", end=" ")
        print(
            "These prompts allow more: check the size of the cache, restarts, and how requests are "
            "distributed over engines (kvstore doctor sidecar)."
            if reported < report["reusable_rate"] - GAP
            else "That is about the maximum for these prompts."
        )
    if not report["causes"]:
        print("No difference costs a block or more: the prompts already share all they can.")
    for number, cause in enumerate(report["causes"][:CAUSES_SHOWN], 1):
        example = cause["example"]
        per_day = cause["lost_tokens_per_day"]
        day = "" if per_day is None else f", {per_day:,.0f} per day"
        print(
            f"\n{number}. {cause['kind']} in {cause['part']}: {cause['requests']:,} requests, "
            f"{cause['lost_tokens']:,} tokens ({cause['lost_tokens'] / tokens:.1%}){day}"
        )
        print(f"   {example['looks_like']}")
        print(f"   {example['a']}: {example['text_a']}")
        print(f"   {example['b']}: {example['text_b']}")
        print(f"   {example['advice']}")
    if len(report["causes"]) > CAUSES_SHOWN:
        print(f"\n{len(report['causes']) - CAUSES_SHOWN} smaller causes: use --json to see them.")
    print(
        f"\nLost to partial blocks of {report['block_tokens']} tokens: "
        f"{report['partial_block_tokens']:,} tokens ({report['partial_block_tokens'] / tokens:.1%})"
        ". Smaller blocks would reuse them."
    )
    print(f"({counted}.)")
    if report["more_not_read"]:
        print("(The log is longer than --limit; the rest was not read.)")
