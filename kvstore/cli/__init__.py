"""The command `kvstore`: one module per command, found by listing this package.

A command's module has `register(app)`, which adds it to the typer app. It imports heavy modules
inside its function. A user's error is raised as ConfigError. It is printed here as one line on
stderr, with exit code 2.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence

import typer

from kvstore.config import renamed
from kvstore.errors import KVStoreError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "common"))
"""Every module of this package but `common` is a command."""

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
"""The extra of the distribution that installs a module."""


def build_app() -> typer.Typer:
    """Build the complete command line."""
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
    """Run one command and return the exit code. Entry point of the console script.

    build: makes the command line. Another program can pass its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    command = typer.main.get_command(build())
    try:
        code = command.main(args=arguments, prog_name="kvstore", standalone_mode=False)
    except KVStoreError as error:
        return _user_error(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _user_error(f"this needs {error.name}; pip install 'kvstore-offload[{extra}]'")
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone (`kvstore ... | head`). Make the final flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        # Typer's message for a wrong command line. Its exception classes moved from click into
        # typer between releases. All of them have this method.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _user_error(_renamed(error) or message())
    return code if isinstance(code, int) else 0


def _renamed(error: Exception) -> str | None:
    """Return the message for an unknown option that is the old name of another."""
    flag = getattr(error, "option_name", None)
    path = getattr(getattr(error, "ctx", None), "command_path", "")
    if not isinstance(flag, str):
        return None
    new = renamed.new_flag(path.partition(" ")[2], flag)
    return None if new is None else renamed.refusal(flag, new)


def _user_error(message: str) -> int:
    print("kvstore: " + " ".join(message.split()), file=sys.stderr)
    return EXIT_USER_ERROR
