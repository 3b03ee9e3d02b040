"""`kvstore hash`: the hashes that vLLM, and kvstore, give a prompt's full blocks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import ConfigError

MAX_INPUT_BYTES = 1 << 28
"""Far more than any context holds; a wrong file on stdin should not fill the memory."""


def register(app: typer.Typer) -> None:
    app.command("hash")(hash_command)


def hash_command(
    tokens: Annotated[
        str, typer.Option(help="Token ids: - reads them from stdin, anything else is a file.")
    ],
    algo: Annotated[str, typer.Option(help="sha256_cbor or xxhash_cbor.")] = "sha256_cbor",
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    hash_seed: Annotated[
        str | None, typer.Option(help="What the engine has in PYTHONHASHSEED, if anything.")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The request's cache_salt.")] = None,
    lora_name: Annotated[str | None, typer.Option(help="The adapter's name.")] = None,
    lora_path: Annotated[str | None, typer.Option(help="The adapter's path.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print one hex hash per full block of a prompt's token ids."""
    from kvstore.blocks.hashing import BlockHasher

    if (lora_name is None) != (lora_path is None):
        raise ConfigError("--lora-name and --lora-path go together: both are part of the hash")
    lora = (lora_name, lora_path) if lora_name is not None and lora_path is not None else None
    hasher = BlockHasher(algo, block_tokens, seed=hash_seed, cache_salt=cache_salt, lora=lora)
    try:
        hashes = [
            block.hex() for block in hasher.feed(parse_token_ids(read_text(tokens, "token ids")))
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print(json.dumps({"hashes": hashes}))
    else:
        for block in hashes:
            print(block)


def parse_token_ids(text: str) -> list[int]:
    """Ids of a JSON list, or of digits separated by any whitespace or commas.

    Raises:
        ConfigError: something else stands there.
    """
    if text.lstrip().startswith("["):
        try:
            ids: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the token ids look like JSON and are not: {error}") from None
        for place, token in enumerate(ids):
            if type(token) is not int:
                raise _no_token(json.dumps(token), place)
        return list(ids)
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for place, word in enumerate(words):
        if not (word.isascii() and word.isdigit()) or len(word) > 20:
            raise _no_token(word, place)
    return [int(word) for word in words]


def _no_token(word: str, place: int) -> ConfigError:
    shown = word if len(word) <= 40 else word[:40] + "..."
    return ConfigError(f"{shown!r} (number {place + 1}) is no token id; ids are integers from 0")


def read_text(source: str, what: str) -> str:
    """The text of a file, or of stdin for "-". Raises ConfigError: it cannot be read as `what`."""
    try:
        if source == "-":
            raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} from {source!r}: {error.strerror}") from None
    if len(raw) > MAX_INPUT_BYTES:
        raise ConfigError(f"more than {MAX_INPUT_BYTES} bytes of {what}; give them in parts")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} from {source!r} are no text") from None
