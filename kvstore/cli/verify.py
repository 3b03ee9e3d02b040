"""`kvstore verify DIR...`: read and check every frame of a disk tier.

Exit code 0: every frame is whole. 1: some are not, or a segment file cannot be read at all. 2: a
directory is no disk tier's, or a store has it open.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvstore.tiers.disk.verify import VerifyReport

EXIT_BAD = 1
MAX_SHOWN = 20
"""Bad frames printed; --json has more."""


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_directory)


def verify_directory(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="The disk tier's directories.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every frame of a disk tier that no store has open.

    Exits with 0 when all are whole, 1 when any is bad, 2 when a directory cannot be checked.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from kvstore.tiers.disk.verify import verify

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("verify", total=None)
        report = verify(
            directories, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(as_dict(report)))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(EXIT_BAD)


def as_dict(report: VerifyReport) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "ok": report.ok,
        "segments": report.segments,
        "segments_bad": report.segments_bad,
        "segments_unsealed": report.segments_unsealed,
        "frames": report.frames,
        "frames_bad": report.bad_count,
        "bytes_checked": report.bytes_checked,
        "bad": [vars(frame) for frame in report.bad],
    }


def _print_report(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvstore.config.units import format_bytes

    console = Console()
    console.print(
        f"{report.frames} frames in {report.segments} segments, "
        f"{format_bytes(report.bytes_checked)}: {report.bad_count} bad"
    )
    if report.segments_unsealed:
        console.print(f"{report.segments_unsealed} segments without an index: scanned")
    if report.segments_bad:
        console.print(f"{report.segments_bad} segment files cannot be read at all")
    if not report.bad:
        return
    table = Table("segment", "offset", "block", "fault")
    for frame in report.bad[:MAX_SHOWN]:
        table.add_row(frame.segment, str(frame.offset_bytes), frame.block, frame.reason)
    console.print(table)
    if report.bad_count > MAX_SHOWN:
        console.print(f"and {report.bad_count - MAX_SHOWN} more")
