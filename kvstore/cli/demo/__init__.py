"""`kvstore demo`: two engines share one sidecar, so each long prompt is computed only once."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.cli.demo.run import Plan, Row

MODELS: Final = ("auto", "smollm2", "random")
PROMPT_TOKENS: Final = 1000
MAX_PROMPT_TOKENS: Final = 3000
"""Maximum that fits into the random model's context, with question and output."""
CHARS_PER_TOKEN: Final = {"smollm2": 4.3, "random": 1.0}
"""English text (the manual) in SmolLM2's tokens. The random model's tokens are bytes."""
SLOT_BYTES: Final = {"smollm2": 16 * 46_080, "random": 16 * 4_096}
"""A block of 16 tokens of float32 KV: layers * 2 * kv_heads * head_dim * 4 bytes per token."""
SPARE_SLOTS: Final = 128
"""Slots beyond the prompts' blocks: for the output, and for blocks that workers use."""
EXIT_FAILED: Final = 1


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, progress on stderr.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Model: auto (SmolLM2 if its wheel is installed, else random), smollm2 or random."
        ),
    ] = "auto",
    prompts: Annotated[int, typer.Option(help="Number of prompts, 1 to 4.")] = 2,
    prompt_tokens: Annotated[
        int, typer.Option(help="Approximate number of tokens per prompt.")
    ] = PROMPT_TOKENS,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 16,
) -> None:
    """Show that a second engine reuses the prompts that the first one has computed."""
    from kvstore.cli.demo.run import STEPS, Demo, check
    from kvstore.cli.demo.show import Show

    plan = make_plan(model, prompts, prompt_tokens, max_tokens)
    show = Show(quiet=as_json)
    signal.signal(signal.SIGTERM, _interrupt)
    rows: list[Row] = []
    faults: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder,
        show.progress(),
        Demo(plan, Path(folder), show.say) as running,
    ):
        running.start()
        for step in STEPS:
            rows.append(running.run(step))
            show.row(rows[-1])
            faults.append(check(step, rows[-1], prompts))
    texts = running.texts
    if as_json:
        print(json.dumps({"rows": [row.plain() for row in rows]}))
    else:
        show.table(rows)
        show.texts(plan.prompts, texts)
    wrong = [fault for fault in faults if fault]
    for fault in wrong:
        typer.echo(f"kvstore: {fault}", err=True)
    if wrong:
        raise typer.Exit(EXIT_FAILED)


def make_plan(model: str, prompts: int, prompt_tokens: int, max_tokens: int) -> Plan:
    """Return the plan of a run.

    Raises:
        ConfigError: a value is invalid.
    """
    from kvstore.cli.demo.prompts import make_prompts
    from kvstore.cli.demo.run import BLOCK_TOKENS, Plan
    from kvstore.engine import smollm2

    if model not in MODELS:
        raise ConfigError(f"unknown demo model {model!r}; use one of {', '.join(MODELS)}")
    if not BLOCK_TOKENS <= prompt_tokens <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"--prompt-tokens must be {BLOCK_TOKENS} to {MAX_PROMPT_TOKENS} (got {prompt_tokens})"
        )
    if not 1 <= max_tokens <= 512:
        raise ConfigError(f"--max-tokens must be 1 to 512 (got {max_tokens})")
    if model == "auto":
        model = "random" if smollm2.find() is None else "smollm2"
    texts = make_prompts(prompts, int(prompt_tokens * CHARS_PER_TOKEN[model]))
    # The number of tokens varies by text: reserve half as many again.
    blocks = prompts * (3 * prompt_tokens // 2 + max_tokens) // BLOCK_TOKENS
    return Plan(model, texts, max_tokens, blocks + SPARE_SLOTS, SLOT_BYTES[model])


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the demo on SIGTERM as on Ctrl-C, with all cleanup."""
    raise KeyboardInterrupt
