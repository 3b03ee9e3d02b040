"""Prints the demo's progress, its table and the generated text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvstore.cli.demo.run import Row


class Show:
    """Prints progress and results. quiet: print only progress, on stderr (for --json)."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=quiet, highlight=False)
        self._status = self._console.status("")

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        with self._status:
            yield

    def say(self, text: str) -> None:
        """Print the current step: a line that is replaced on a terminal, else a new line."""
        if self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(text, markup=False)

    def row(self, row: Row) -> None:
        """Print the result of a step."""
        self._console.print(
            f"{row.step}: {row.cached_tokens} of {row.prompt_tokens} tokens from {row.tier}, "
            f"first token after {row.ttft_ms:,.0f} ms",
            markup=False,
        )

    def table(self, rows: Sequence[Row]) -> None:
        table = Table(title="The same prompts, five times")
        for name in ("step", "engine"):
            table.add_column(name, no_wrap=True)
        for name in ("prompt tokens", "cached tokens"):
            table.add_column(name, justify="right")
        table.add_column("tier")
        table.add_column("TTFT ms", justify="right")
        table.add_column("identical")
        for row in rows:
            table.add_row(
                row.step,
                row.engine,
                f"{row.prompt_tokens:,}",
                f"{row.cached_tokens:,}",
                row.tier,
                f"{row.ttft_ms:,.0f}",
                "yes" if row.identical else "NO",
            )
        self._console.print(table)

    def texts(self, prompts: Sequence[str], texts: Sequence[str]) -> None:
        for prompt, text in zip(prompts, texts, strict=True):
            question = prompt.rstrip().splitlines()[-2].strip()
            self._console.print(Panel(Text(text.strip() or "(nothing printable)"), title=question))
