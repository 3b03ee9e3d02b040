"""The command `kvstore`: one file per command, found by listing this folder.

A command's module offers `register(app)`, which adds it to the typer app, and imports what is
heavy inside its function. A user's mistake is raised as ConfigError and printed here, in one
place, as one line on stderr with exit code 2.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence

import typer

from kvstore.errors import KVStoreError

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "common"))
"""Every module of this package but `common` is one command."""

_EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "tokenizers": "engine",
    "gguf": "engine",
    "jinja2": "engine",
    "redis": "redis",
    "boto3": "s3",
    "httpx": "bench",
    "openai": "bench",
    "matplotlib": "bench",
    "cbor2": "bench",
}
"""Which extra of the distribution brings a module that a command may lack."""


def build_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="kvstore",
        help="KV-cache offload for LLM inference: never compute the same prefix twice.",
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _group() -> None:
        # A callback keeps typer from turning an app of one command into that command.
        return None

    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


def main(argv: Sequence[str] | None = None, build: Callable[[], typer.Typer] = build_app) -> int:
    """Run one command; the process's exit code. The console script's entry point.

    build: makes the command line; another program may give its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    command = typer.main.get_command(build())
    try:
        code = command.main(args=arguments, prog_name="kvstore", standalone_mode=False)
    except KVStoreError as error:
        return _mistake(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _mistake(f"this needs {error.name}; pip install 'kvstore-offload[{extra}]'")
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`kvstore ... | head`); keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        # Typer's own words for a wrong command line. Its exception classes moved from click into
        # typer between releases; what they all have is this method.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _mistake(message())
    return code if isinstance(code, int) else 0


def _mistake(message: str) -> int:
    print("kvstore: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_MISTAKE
