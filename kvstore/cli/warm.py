"""`kvstore warm`: loads blocks into L2 before a request needs them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

TIMEOUT_S: Final = 600.0
"""Timeout of one call. It can read many blocks, or compute a long prompt."""
POLL_S: Final = 0.5
"""Seconds between two readings of the progress."""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def warm(
        fraction: Annotated[
            float | None,
            typer.Option(help="Fill this fraction of L2 (0 to 1) from the tiers below L2."),
        ] = None,
        prompts: Annotated[
            Path | None,
            typer.Option(
                help="Replay the prompts of this file on an engine. One JSON object per line: "
                "prompt (text or token ids) or messages, and other API parameters."
            ),
        ] = None,
        engine: Annotated[
            str | None,
            typer.Option(help="URL of the engine's OpenAI-compatible API, http://host:port/v1."),
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(help="Model name on that engine. Default: the first that it lists."),
        ] = None,
        url: Annotated[
            str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
        ] = None,
        auth_token: Annotated[
            str | None, typer.Option(help="Auth token of the sidecar, or of the engine.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Warm L2 from the tiers below it, or by replaying prompts on an engine."""
        from kvstore.cli.common.sidecar_http import sidecar_url
        from kvstore.errors import ConfigError

        if (fraction is None) == (prompts is None):
            raise ConfigError("give either --fraction or --prompts")
        if fraction is not None:
            answer = _fill(sidecar_url(url), fraction, auth_token)
            print(json.dumps(answer) if as_json else f"{answer['warmed']} blocks loaded into L2")
            return
        assert prompts is not None
        if engine is None:
            raise ConfigError("--prompts needs --engine http://host:port/v1")
        sent = _replay(list(_requests(prompts)), engine, model, auth_token)
        print(json.dumps({"prompts": sent}) if as_json else f"{sent} prompts replayed")


def _fill(url: str, fraction: float, auth_token: str | None) -> dict[str, Any]:
    """Make the sidecar load blocks. On a terminal, a bar shows how full L2 is."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstore.cli.common.sidecar_http import request_json
    from kvstore.errors import TierUnavailable

    console = Console(stderr=True)
    done = threading.Event()

    def follow(bar: Progress) -> None:
        task = bar.add_task("warming", total=None)
        while not done.wait(POLL_S):
            try:
                l2 = request_json(url, "/v1/stats", auth_token=auth_token)["l2"]
            except TierUnavailable:
                continue  # With tenants, the admin's auth token gives no statistics.
            ready = l2["slots_ready"]
            bar.update(task, completed=ready, total=max(ready, int(fraction * l2["slots"])))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        looking = threading.Thread(target=follow, args=(bar,), daemon=True)
        if console.is_terminal:
            looking.start()
        try:
            return request_json(
                url, "/v1/warm", {"fraction": fraction}, auth_token=auth_token, timeout_s=TIMEOUT_S
            )
        finally:
            done.set()


def _replay(
    requests: list[dict[str, Any]], engine: str, model: str | None, auth_token: str | None
) -> int:
    """Send each request with max_tokens=1, in order. Returns their number."""
    from rich.console import Console
    from rich.progress import track

    from kvstore.cli.common.sidecar_http import request_json

    named = model or str(request_json(engine, "/models", auth_token=auth_token)["data"][0]["id"])
    for request in track(requests, "replaying", console=Console(stderr=True), transient=True):
        path = "/chat/completions" if "messages" in request else "/completions"
        body = {"model": named, **request, "max_tokens": 1, "stream": False}
        request_json(engine, path, body, auth_token=auth_token, timeout_s=TIMEOUT_S)
    return len(requests)


def _requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a file. Raises ConfigError naming the first invalid line."""
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
                f"line {number} of {str(path)!r} is not a prompt; expected "
                '{"prompt": "..."} or {"messages": [...]}'
            )
        yield request
