"""`kvstore plan`: what a model's KV takes, and how much of it a node's tiers hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.blocks import Namespace
from kvstore.errors import ConfigError
from kvstore.tiers.base import PAGE_BYTES

PREFIXES = {"2k": 2_048, "8k": 8_192, "32k": 32_768}
"""Prompt lengths, in tokens, that the plan counts."""

MAX_CONFIG_BYTES = 1 << 24


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or the folder it is in.")],
    ram: Annotated[str, typer.Option(help="Size of L2, such as 200GiB.")] = "0",
    disk: Annotated[str, typer.Option(help="Size of the disk tier, such as 2TiB.")] = "0",
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    dtype: Annotated[
        str | None, typer.Option(help="The KV cache's dtype where it is not the model's.")
    ] = None,
    tp_size: Annotated[int, typer.Option(help="Tensor-parallel ranks; figures are of one.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print bytes per token, tokens per tier, and how many 2k, 8k and 32k prefixes fit."""
    from kvstore.geometry import namespace_from_hf
    from kvstore.units import parse_bytes

    namespace = namespace_from_hf(
        read_config(config),
        model=str(config),
        dtype=dtype,
        block_tokens=block_tokens,
        tp_size=tp_size,
    )
    sizes = {"ram": parse_bytes(ram), "disk": parse_bytes(disk)}
    report = {
        "dtype": namespace.dtype,
        "attention": namespace.attention,
        "bytes_per_token": namespace.bytes_per_token,
        "block_tokens": namespace.block_tokens,
        "block_bytes": namespace.block_bytes,
        "rows": [tier_row(namespace, tier, size) for tier, size in sizes.items() if size],
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print_tables(report)


def tier_row(namespace: Namespace, tier: str, size_bytes: int) -> dict[str, Any]:
    """What fits in one tier, in whole blocks: slots in ram, frames with a header page on disk.

    Frames are counted as if no codec shrank them: how far it does depends on the text.
    """
    block = -(-namespace.block_bytes // PAGE_BYTES) * PAGE_BYTES
    blocks = size_bytes // (block + (PAGE_BYTES if tier == "disk" else 0))
    row: dict[str, Any] = {
        "tier": tier,
        "bytes": size_bytes,
        "blocks": blocks,
        "tokens": blocks * namespace.block_tokens,
    }
    for label, tokens in PREFIXES.items():
        row[f"prefixes_{label}"] = blocks // -(-tokens // namespace.block_tokens)
    return row


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config.json at `path` or in the folder `path`; ConfigError if there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{str(file)!r} is larger than any config.json")
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} holds no JSON object; is this a model's config.json?")
    return config


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvstore.units import format_bytes

    console = Console()
    console.print(
        f"{report['bytes_per_token']:,} bytes per token ({report['dtype']}, "
        f"{report['attention']}); {format_bytes(report['block_bytes'])} per block of "
        f"{report['block_tokens']} tokens",
        highlight=False,
    )
    if not report["rows"]:
        return
    table = Table()
    table.add_column("tier")
    for column in ("size", "blocks", "tokens", *(f"{label} prefixes" for label in PREFIXES)):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        counts = ["blocks", "tokens", *(f"prefixes_{label}" for label in PREFIXES)]
        size = format_bytes(row["bytes"])
        table.add_row(row["tier"], size, *(f"{row[count]:,}" for count in counts))
    console.print(table)
