"""`kvstore config show | check | schema | reload`: the configuration and its changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.common.set_option import Assignments, assigned

EXIT_MISTAKE = 2

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Show, check or reload the configuration.", no_args_is_help=True)
    for command in (show, check, schema, reload):
        group.command()(command)
    app.add_typer(group, name="config")


def show(
    config: Annotated[
        str | None, typer.Option(help="TOML file; KVSTORE_* and the options here win over it.")
    ] = None,
    set_: Assignments = None,
    as_json: Json = False,
) -> None:
    """Print every value in force and where it comes from: default, file, environment or flag.

    The output is a configuration file that says all of it. Secrets are masked.
    """
    from kvstore.cli.common.config_in_force import as_json as to_json
    from kvstore.cli.common.config_in_force import as_toml, effective

    tables = effective(config, assigned(set_))
    if as_json:
        print(json.dumps(to_json(tables)))
    else:
        print("\n".join(as_toml(tables)).rstrip())


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="TOML files.")],
    as_json: Json = False,
) -> None:
    """Check files fully, tiers' own keys, names and sizes included; every mistake is a line.

    Nothing is opened, made or asked, and KVSTORE_* is not read. Exits with 2 when a file has a
    mistake.
    """
    from kvstore.cli.common.config_check import wrong_with

    mistakes = {str(file): wrong_with(file) for file in files}
    if as_json:
        report = [
            {"file": file, "ok": not lines, "mistakes": lines} for file, lines in mistakes.items()
        ]
        print(json.dumps({"ok": not any(mistakes.values()), "files": report}))
    else:
        for file, lines in mistakes.items():
            if not lines:
                print(f"{file}: right")
            for line in lines:
                print(f"{file}: {' '.join(line.split())}", file=sys.stderr)
    if any(mistakes.values()):
        raise typer.Exit(EXIT_MISTAKE)


def schema(
    as_json: Annotated[
        bool, typer.Option("--json", help="In one line; it is JSON either way.")
    ] = False,
) -> None:
    """Print the JSON Schema of the file, the tiers' own parts included."""
    from kvstore.cli.common.config_schema import schema as make

    print(json.dumps(make(), indent=None if as_json else 2))


def reload(
    url: Annotated[
        str | None, typer.Option(help="The sidecar's HTTP side, http://host:port.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="The admin token, where it asks for one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Have a running sidecar read its file anew, as SIGHUP does.

    What can change while it runs does, all of it at once. Exits with 2, and nothing has changed,
    when the file has a mistake or changes what needs a restart.
    """
    from kvstore.cli.common.sidecar_http import address, ask

    answer = ask(address(url), "/v1/reload", {}, token=token, limit_s=60.0)
    if as_json:
        print(json.dumps(answer))
        return
    for change in answer["changed"]:
        print(_said(change))
    for key in answer["for_engines"]:
        print(f"{key}: engines read it when they start")
    if not answer["changed"] and not answer["for_engines"]:
        print("nothing has changed")


def _said(change: dict[str, Any]) -> str:
    if "was" not in change:
        return f"{change['key']}: changed"
    return f"{change['key']}: {change['was']} -> {change['now']}"
