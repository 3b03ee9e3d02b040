"""`kvstore config show | check | schema | reload`: shows, checks and reloads the configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.common.set_option import Assignments, assigned

EXIT_USER_ERROR = 2

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Show, check or reload the configuration.", no_args_is_help=True)
    for command in (show, check, schema, reload):
        group.command()(command)
    app.add_typer(group, name="config")


def show(
    config: Annotated[
        str | None,
        typer.Option(help="Configuration file (TOML). KVSTORE_* and options override it."),
    ] = None,
    set_: Assignments = None,
    as_json: Json = False,
) -> None:
    """Print every effective value with its source: default, file, environment or flag.

    The output is a complete configuration file. Secrets are masked.
    """
    from kvstore.cli.common.config_in_force import as_json as to_json
    from kvstore.cli.common.config_in_force import as_toml, effective

    tables = effective(config, assigned(set_))
    if as_json:
        print(json.dumps(to_json(tables)))
    else:
        print("\n".join(as_toml(tables)).rstrip())


def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Configuration files (TOML) to check.")
    ],
    as_json: Json = False,
) -> None:
    """Check configuration files, including the tiers' own keys. Prints one line per error.

    Does not open files, create directories or connect to servers. Ignores KVSTORE_* variables.
    Exits with 2 if a file has an error.
    """
    from kvstore.cli.common.config_check import find_errors

    errors = {str(file): find_errors(file) for file in files}
    if as_json:
        report = [
            {"file": file, "ok": not lines, "errors": lines} for file, lines in errors.items()
        ]
        print(json.dumps({"ok": not any(errors.values()), "files": report}))
    else:
        for file, lines in errors.items():
            if not lines:
                print(f"{file}: ok")
            for line in lines:
                print(f"{file}: {' '.join(line.split())}", file=sys.stderr)
    if any(errors.values()):
        raise typer.Exit(EXIT_USER_ERROR)


def schema(
    as_json: Annotated[bool, typer.Option("--json", help="Print the schema in one line.")] = False,
) -> None:
    """Print the JSON Schema of the configuration file, including the tiers' own keys."""
    from kvstore.cli.common.config_schema import schema as make

    print(json.dumps(make(), indent=None if as_json else 2))


def reload(
    url: Annotated[
        str | None, typer.Option(help="URL of the sidecar's HTTP server, http://host:port.")
    ] = None,
    auth_token: Annotated[
        str | None, typer.Option(help="The sidecar's admin auth token, if it requires one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a running sidecar read its configuration file again, as SIGHUP does.

    All changed keys that can change at runtime take effect at once. If the file has an error, or
    changes a key that needs a restart, nothing changes and the exit code is 2.
    """
    from kvstore.cli.common.sidecar_http import request_json, sidecar_url

    answer = request_json(sidecar_url(url), "/v1/reload", {}, auth_token=auth_token, timeout_s=60.0)
    if as_json:
        print(json.dumps(answer))
        return
    for change in answer["changed"]:
        print(_describe(change))
    for key in answer["for_engines"]:
        print(f"{key}: read by engines at start")
    if not answer["changed"] and not answer["for_engines"]:
        print("no changes")


def _describe(change: dict[str, Any]) -> str:
    if "old" not in change:
        return f"{change['key']}: changed"
    return f"{change['key']}: {change['old']} -> {change['new']}"
