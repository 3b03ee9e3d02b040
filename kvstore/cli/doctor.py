"""`kvstore doctor NAME`: one file per kind of check in `doctors/`, found by listing it.

A doctor's module offers `register(app)` as a command's does.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

from kvstore.cli import doctors

DOCTORS = tuple(sorted(m.name for m in pkgutil.iter_modules(doctors.__path__)))


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Check an environment, or why prompts do not hit.", invoke_without_command=True
    )
    group.callback()(list_doctors)
    for name in DOCTORS:
        importlib.import_module(f"{doctors.__name__}.{name}").register(group)
    app.add_typer(group, name="doctor")


def list_doctors(context: typer.Context) -> None:
    """Check something; without a name, list what there is to check."""
    if context.invoked_subcommand is None:
        for name in DOCTORS:
            print(name)
