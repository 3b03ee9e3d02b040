"""`kvstore warm`: have blocks in L2 before anybody asks for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

LIMIT_S: Final = 600.0
"""Longest that one call may take: much is read, or a long prompt computed."""
LOOK_S: Final = 0.5
"""Between two looks at how far it is."""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def warm(
        share: Annotated[
            float | None,
            typer.Option(help="Fill this share of L2 (0 to 1) from the tiers below it."),
        ] = None,
        prompts: Annotated[
            Path | None,
            typer.Option(
                help="Or send these to an engine, a JSON object a line: prompt (text or token "
                "ids) or messages, and what else its API takes."
            ),
        ] = None,
        engine: Annotated[
            str | None, typer.Option(help="The engine's OpenAI-compatible API, http://host:port/v1")
        ] = None,
        model: Annotated[str | None, typer.Option(help="Its name of the model.")] = None,
        url: Annotated[str | None, typer.Option(help="The sidecar's HTTP side.")] = None,
        token: Annotated[str | None, typer.Option(help="A token for either.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Warm L2: from what the tiers below hold, or by replaying prompts through an engine."""
        from kvstore.cli.common.sidecar_http import address
        from kvstore.errors import ConfigError

        if (share is None) == (prompts is None):
            raise ConfigError("give --share or --prompts, one of them")
        if share is not None:
            answer = _fill(address(url), share, token)
            print(json.dumps(answer) if as_json else f"{answer['warmed']} blocks brought into L2")
            return
        assert prompts is not None
        if engine is None:
            raise ConfigError("--prompts goes with --engine http://host:port/v1")
        sent = _replay(list(_requests(prompts)), engine, model, token)
        print(json.dumps({"prompts": sent}) if as_json else f"{sent} prompts replayed")


def _fill(url: str, share: float, token: str | None) -> dict[str, Any]:
    """Have the sidecar read; meanwhile a bar shows how full L2 is, where a person looks on."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.cli.common.sidecar_http import ask
    from kvstore.errors import TierUnavailable

    console = Console(stderr=True)
    done = threading.Event()

    def follow(bar: Progress) -> None:
        task = bar.add_task("warming", total=None)
        while not done.wait(LOOK_S):
            try:
                l2 = ask(url, "/v1/stats", token=token)["l2"]
            except TierUnavailable:
                continue  # the administrator's token shows no statistics where tenants have theirs
            ready = l2["slots_ready"]
            bar.update(task, completed=ready, total=max(ready, int(share * l2["slots"])))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        looking = threading.Thread(target=follow, args=(bar,), daemon=True)
        if console.is_terminal:
            looking.start()
        try:
            return ask(url, "/v1/warm", {"share": share}, token=token, limit_s=LIMIT_S)
        finally:
            done.set()


def _replay(
    requests: list[dict[str, Any]], engine: str, model: str | None, token: str | None
) -> int:
    """Send each for one token, in order; how many."""
    from rich.console import Console
    from rich.progress import track

    from kvstore.cli.common.sidecar_http import ask

    named = model or str(ask(engine, "/models", token=token)["data"][0]["id"])
    for request in track(requests, "replaying", console=Console(stderr=True), transient=True):
        path = "/chat/completions" if "messages" in request else "/completions"
        body = {"model": named, **request, "max_tokens": 1, "stream": False}
        ask(engine, path, body, token=token, limit_s=LIMIT_S)
    return len(requests)


def _requests(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a file. Raises ConfigError naming the first line that is none."""
    from kvstore.cli.hash import read_text
    from kvstore.errors import ConfigError

    for number, line in enumerate(read_text(str(path), "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        if not isinstance(request, dict) or len({"prompt", "messages"} & set(request)) != 1:
            raise ConfigError(
                f'line {number} of {str(path)!r} is no prompt; {{"prompt": "..."}} or '
                '{"messages": [...]} is right'
            )
        yield request
