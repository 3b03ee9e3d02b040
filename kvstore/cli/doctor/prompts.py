"""`kvstore doctor prompts`: where two prompts first differ, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvstore.analysis.diagnose.compare import Comparison


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def prompts(
        first: Annotated[str, typer.Argument(help="Earlier prompt: a file, or its text.")],
        second: Annotated[
            str, typer.Argument(help="Later prompt that was expected to hit: a file, or its text.")
        ],
        tokenizer: Annotated[
            str | None,
            typer.Option(help="Tokenizer: a folder with tokenizer.json, a .gguf file, or smollm2."),
        ] = None,
        block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
        requests_per_day: Annotated[
            float | None,
            typer.Option(help="Number of such requests per day, to compute the daily cost."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Report where two prompts first differ, the likely cause, its cost, and the fix."""
        from kvstore.analysis.diagnose.compare import compare
        from kvstore.cli.common.prompt_diff import (
            check_sizes,
            comparison_row,
            counted_by,
            reader_of,
        )

        check_sizes(block_tokens, requests_per_day)
        reader = reader_of(tokenizer)
        seen = compare(reader.argument(first), reader.argument(second), block_tokens)
        per_day = None if requests_per_day is None else seen.lost * requests_per_day
        if as_json:
            row = comparison_row(seen)
            print(json.dumps({**row, "lost_tokens_per_day": per_day, "exact": bool(tokenizer)}))
        else:
            _show(seen, per_day, counted_by(bool(tokenizer)))


def _show(seen: Comparison, per_day: float | None, counted: str) -> None:
    first, second = seen.context()
    tokens = seen.b.tokens
    print(f"The second prompt has {tokens:,} tokens; {seen.reused:,} of them are reusable.")
    print(
        f"The prompts differ after {seen.shared:,} tokens ({seen.char:,} characters), in block "
        f"{seen.block} of {seen.block_tokens} tokens, in {seen.part}:"
    )
    print(f"  first   {first}")
    print(f"  second  {second}")
    print(f"Likely cause: {seen.diagnosis.looks} ({seen.diagnosis.kind}).")
    cost = f"Cost: {seen.lost:,} tokens that the first prompt also has"
    print(cost + ("." if per_day is None else f", {per_day:,.0f} per day."))
    print(seen.diagnosis.advice)
    print(f"({counted}.)")
