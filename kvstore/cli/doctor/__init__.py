"""`kvstore doctor NAME`: one module of this package per check, found by listing it.

A check's module has `register(app)`, as a command's has.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

DOCTORS = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "report"))


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Check an environment, or find out why prompts miss the cache.",
        invoke_without_command=True,
    )
    group.callback()(list_doctors)
    for name in DOCTORS:
        importlib.import_module(f"{__name__}.{name}").register(group)
    app.add_typer(group, name="doctor")


def list_doctors(context: typer.Context) -> None:
    """Run a check. Without a name, list the checks."""
    if context.invoked_subcommand is None:
        for name in DOCTORS:
            print(name)
