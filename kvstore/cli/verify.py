"""`kvstore verify DIR...`: reads and checks every frame of a disk tier.

Exit code 0: all frames are intact. 1: a frame is corrupt, or a segment file cannot be read. 2: a
directory is not a disk tier's, or a store has it open. 3: nothing is corrupt, but frames of another
release were not checked.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvstore.tiers.disk.verify import VerifyReport

EXIT_CORRUPT = 1
EXIT_UNSUPPORTED = 3
MAX_SHOWN = 20
"""Number of corrupt frames printed. --json has more."""


def register(app: typer.Typer) -> None:
    app.command("verify")(verify_directory)


def verify_directory(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="Directories of the disk tier.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every frame of a disk tier that no store has open.

    Exits with 0 if all frames are intact, 1 if a frame is corrupt, 2 if a directory cannot be
    checked, 3 if nothing is corrupt but frames or segments of another release were not checked.
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
        raise typer.Exit(EXIT_CORRUPT)
    if report.unsupported_count or report.segments_unsupported:
        raise typer.Exit(EXIT_UNSUPPORTED)


def as_dict(report: VerifyReport) -> dict[str, Any]:
    """Return the report for JSON."""
    return {
        "ok": report.ok,
        "segments": report.segments,
        "segments_corrupt": report.segments_corrupt,
        "segments_unsealed": report.segments_unsealed,
        "segments_unsupported": report.segments_unsupported,
        "frames": report.frames,
        "frames_corrupt": report.corrupt_count,
        "frames_unsupported": report.unsupported_count,
        "bytes_checked": report.bytes_checked,
        "corrupt": [vars(frame) for frame in report.corrupt],
        "unsupported": dict(report.unsupported),
    }


def _print_report(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvstore.config.units import format_bytes

    console = Console()
    console.print(
        f"{report.frames} frames in {report.segments} segments, "
        f"{format_bytes(report.bytes_checked)}: {report.corrupt_count} corrupt"
    )
    if report.segments_unsealed:
        console.print(f"{report.segments_unsealed} segments have no index and were scanned")
    if report.segments_corrupt:
        console.print(f"{report.segments_corrupt} segment files cannot be read")
    if report.segments_unsupported:
        console.print(
            f"{report.segments_unsupported} segments of another release: not fully checked"
        )
    for reason, frames in report.unsupported.items():
        console.print(f"{frames} frames of another release: not checked: {reason}", markup=False)
    if not report.corrupt:
        return
    table = Table("segment", "offset", "block", "fault")
    for frame in report.corrupt[:MAX_SHOWN]:
        table.add_row(frame.segment, str(frame.offset_bytes), frame.block, frame.reason)
    console.print(table)
    if report.corrupt_count > MAX_SHOWN:
        console.print(f"and {report.corrupt_count - MAX_SHOWN} more")
