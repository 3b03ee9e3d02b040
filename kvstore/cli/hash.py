"""`kvstore hash`: prints the hashes that vLLM and kvstore give to a prompt's full blocks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import ConfigError

MAX_INPUT_BYTES = 1 << 28
"""Far above any context. Keeps a wrong file on stdin from filling the memory."""


def register(app: typer.Typer) -> None:
    app.command("hash")(hash_command)


def hash_command(
    token_ids: Annotated[
        str, typer.Option(help="File with the prompt's token ids, or - for stdin.")
    ],
    algo: Annotated[
        str, typer.Option(help="Hash algorithm: sha256_cbor or xxhash_cbor.")
    ] = "sha256_cbor",
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    hash_seed: Annotated[
        str | None, typer.Option(help="The engine's PYTHONHASHSEED, if it is set.")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="cache_salt of the request.")] = None,
    lora_name: Annotated[str | None, typer.Option(help="Name of the LoRA adapter.")] = None,
    lora_path: Annotated[str | None, typer.Option(help="Path of the LoRA adapter.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print one hex hash per full block of a prompt's token ids."""
    from kvstore.blocks.hashing import BlockHasher

    if (lora_name is None) != (lora_path is None):
        raise ConfigError("give both --lora-name and --lora-path: the hash depends on both")
    lora = (lora_name, lora_path) if lora_name is not None and lora_path is not None else None
    hasher = BlockHasher(algo, block_tokens, seed=hash_seed, cache_salt=cache_salt, lora=lora)
    try:
        hashes = [
            block.hex() for block in hasher.feed(parse_token_ids(read_text(token_ids, "token ids")))
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        print(json.dumps({"hashes": hashes}))
    else:
        for block in hashes:
            print(block)


def parse_token_ids(text: str) -> list[int]:
    """Parse a JSON list of ids, or ids separated by whitespace or commas.

    Raises:
        ConfigError: the text is neither.
    """
    if text.lstrip().startswith("["):
        try:
            ids: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"token ids are invalid JSON: {error}") from None
        for place, token in enumerate(ids):
            if type(token) is not int:
                raise _invalid_token(json.dumps(token), place)
        return list(ids)
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for place, word in enumerate(words):
        if not (word.isascii() and word.isdigit()) or len(word) > 20:
            raise _invalid_token(word, place)
    return [int(word) for word in words]


def _invalid_token(word: str, place: int) -> ConfigError:
    shown = word if len(word) <= 40 else word[:40] + "..."
    return ConfigError(f"token id {place + 1} must be a non-negative integer (got {shown!r})")


def read_text(source: str, what: str) -> str:
    """Read a file, or stdin for "-". Raises ConfigError on failure. what: for messages."""
    try:
        if source == "-":
            raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} from {source!r}: {error.strerror}") from None
    if len(raw) > MAX_INPUT_BYTES:
        raise ConfigError(f"{what} from {source!r} are longer than {MAX_INPUT_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} from {source!r} are not UTF-8 text") from None
