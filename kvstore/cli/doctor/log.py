"""`kvstore doctor log`: what keeps the requests of a log from hitting, by cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.analysis.diagnose.log import Cause, LogDoctor

CAUSES_SHOWN: Final = 8
GAP_SHARE: Final = 0.05
"""A server that hits this much less than an endless cache would loses it elsewhere."""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def log(
        file: Annotated[Path, typer.Argument(help="JSON lines: requests as OpenAI's API has.")],
        tokenizer: Annotated[
            str | None,
            typer.Option(help="A folder with tokenizer.json, a .gguf file, or smollm2."),
        ] = None,
        block_tokens: Annotated[int, typer.Option(help="Tokens of a block (a page).")] = 16,
        requests_per_day: Annotated[
            float | None, typer.Option(help="Instead of the log's own rate.")
        ] = None,
        limit: Annotated[int, typer.Option(help="Read so many requests at most.")] = 100_000,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Say what share of a log's tokens could hit, and which differences cost how many."""
        from kvstore.cli.common.prompt_diff import check_sizes, counted_by, reader_of

        check_sizes(block_tokens, requests_per_day)
        if limit < 1:
            raise ConfigError(f"--limit {limit}; at least 1 is right")
        reader = reader_of(tokenizer)
        doctor, more = _read(reader.log(file), file, block_tokens, limit)
        if not doctor.requests:
            raise ConfigError(f"{str(file)!r} holds no requests")
        report = _report(doctor, requests_per_day, exact=bool(tokenizer), more=more)
        if as_json:
            print(json.dumps(report))
        else:
            _show(report, counted_by(bool(tokenizer)))


def _read(prompts: Any, file: Path, block_tokens: int, limit: int) -> tuple[LogDoctor, bool]:
    """The doctor after all requests, and whether there are more than the limit."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.analysis.diagnose.log import LogDoctor

    doctor = LogDoctor(block_tokens)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        size = file.stat().st_size if file.is_file() else None
        task = progress.add_task("reading", total=size)
        for prompt in prompts:
            if doctor.requests >= limit:
                return doctor, True
            doctor.add(prompt)
            progress.advance(task, len(prompt.text))
    return doctor, False


def _report(
    doctor: LogDoctor, requests_per_day: float | None, *, exact: bool, more: bool
) -> dict[str, Any]:
    told = doctor.told_tokens
    return {
        "requests": doctor.requests,
        "more_not_read": more,
        "exact": exact,
        "block_tokens": doctor.block_tokens,
        "prompt_tokens": doctor.tokens,
        "reusable_tokens": doctor.reusable,
        "reusable_rate": round(doctor.reusable / max(1, doctor.tokens), 4),
        "served_hit_rate": round(doctor.cached_tokens / told, 4) if told else None,
        "lost_tokens": doctor.lost,
        "lost_tokens_per_day": doctor.per_day(doctor.lost, requests_per_day),
        "partial_block_tokens": doctor.partial,
        "span_s": round(doctor.span_s, 3),
        "causes": [_row(cause, doctor, requests_per_day) for cause in doctor.worst_first()],
    }


def _row(cause: Cause, doctor: LogDoctor, requests_per_day: float | None) -> dict[str, Any]:
    from kvstore.cli.common.prompt_diff import comparison_row

    assert cause.worst is not None
    return {
        "kind": cause.kind,
        "part": cause.part,
        "requests": cause.requests,
        "lost_tokens": cause.tokens,
        "lost_tokens_per_day": doctor.per_day(cause.tokens, requests_per_day),
        "example": comparison_row(cause.worst),
    }


def _show(report: dict[str, Any], counted: str) -> None:
    tokens = max(1, report["prompt_tokens"])
    print(
        f"{report['requests']:,} requests, {report['prompt_tokens']:,} prompt tokens. An endless "
        f"cache would reuse {report['reusable_rate']:.1%} of them; {report['lost_tokens']:,} more "
        f"({report['lost_tokens'] / tokens:.1%}) were in an earlier prompt, but not in the same "
        "place."
    )
    served = report["served_hit_rate"]
    if served is not None:
        print(f"The server hit {served:.1%}.", end=" ")
        print(
            "That is less than these prompts allow: look at the cache's size, at restarts, and at "
            "how requests are spread over engines (kvstore doctor sidecar)."
            if served < report["reusable_rate"] - GAP_SHARE
            else "That is about what these prompts allow."
        )
    if not report["causes"]:
        print("No difference costs a block or more: prompts share what they can.")
    for number, cause in enumerate(report["causes"][:CAUSES_SHOWN], 1):
        example = cause["example"]
        per_day = cause["lost_tokens_per_day"]
        day = "" if per_day is None else f", {per_day:,.0f} a day"
        print(
            f"\n{number}. {cause['kind']} in {cause['part']}: {cause['requests']:,} requests, "
            f"{cause['lost_tokens']:,} tokens ({cause['lost_tokens'] / tokens:.1%}){day}"
        )
        print(f"   {example['looks_like']}")
        print(f"   {example['a']}: {example['text_a']}")
        print(f"   {example['b']}: {example['text_b']}")
        print(f"   {example['advice']}")
    if len(report["causes"]) > CAUSES_SHOWN:
        print(f"\n{len(report['causes']) - CAUSES_SHOWN} smaller causes: --json has them.")
    print(
        f"\nParts of blocks of {report['block_tokens']} left over: "
        f"{report['partial_block_tokens']:,} tokens ({report['partial_block_tokens'] / tokens:.1%})"
        "; smaller blocks would reuse them."
    )
    print(f"({counted}.)")
    if report["more_not_read"]:
        print("(The log is longer than --limit; the rest was not read.)")
