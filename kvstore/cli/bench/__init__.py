"""`kvstore bench NAME`: one module of this package per benchmark, found by listing it.

A benchmark's module has `register(app)`, as a command's has.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

BENCHES = tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Run a benchmark.", invoke_without_command=True)
    group.callback()(list_benches)
    for name in BENCHES:
        importlib.import_module(f"{__name__}.{name}").register(group)
    app.add_typer(group, name="bench")


def list_benches(context: typer.Context) -> None:
    """Run a benchmark. Without a name, list the benchmarks."""
    if context.invoked_subcommand is None:
        for name in BENCHES:
            print(name)
