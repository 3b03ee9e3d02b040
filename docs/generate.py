"""Generates cli.md from the commands, configuration.md from the configuration's models, and
sglang_arguments.md from the table of SGLang's arguments.

python docs/generate.py            # writes all
python docs/generate.py --check    # exits with 1 if one is out of date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import typer

from kvstore.cli import build_app
from kvstore.cli.common.config_keys import (
    ConfigKey,
    common_tier_keys,
    config_keys,
    sections,
    tier_models,
)
from kvstore.config.settings import TierSettings
from kvstore.connectors.sglang.server_arguments import VERDICTS
from kvstore.service.reload import ENGINE_SECTIONS, RELOADABLE

HERE = Path(__file__).parent

CLI_HEAD = """\
# The command line

Generated from the commands by `docs/generate.py`. A test fails if this page is out of date.

```bash
kvstore --help
kvstore serve --help
```

Every command that prints results takes `--json`: it then prints one JSON object to stdout and
nothing else. Warnings and progress go to stderr, progress only if stderr is a terminal. `KVSTORE_*`
and configuration files: [configuration.md](configuration.md).

## Exit codes

| Code | Meaning |
| --- | --- |
| 0 | success |
| 1 | the command ran and found a problem: a corrupt frame, not every block pinned, a tier that cannot be listed, a failed check or request. The command's own text has the details |
| 2 | an error in the command line or the configuration, or something required is missing (no sidecar, no extra installed): one line on stderr, nothing was done |
| 130 | interrupted by Ctrl-C |
| 141 | the reader of its output has exited (`kvstore ... \\| head`) |

## Completion

For bash, zsh and fish, in the shell where you want completion:

```bash
kvstore --install-completion
kvstore --show-completion
```

The first command installs the completion. The second prints it.
"""  # noqa: E501

CONFIGURATION_HEAD = """\
# Configuration

Generated from the configuration's models by `docs/generate.py`. A test fails if this page is out of
date.

One tree of keys for the sidecar, the engines and the connectors. Later sources override earlier
ones:

1. the defaults below,
2. a TOML file (`--config FILE`),
3. the environment: `KVSTORE_` and the path of the key, joined by two underscores, as in
   `KVSTORE_L2__BYTES=4GiB`; lists and tables as JSON, as in `KVSTORE_TIERS='[{"kind": "memory"}]'`,
4. the command line: a command's own options, and `--set KEY=VALUE` for any key.

Tables are merged key by key. Lists are replaced as a whole. An unknown key is an error; the message
suggests the closest valid key.

```toml
[l2]
bytes = "64GiB"
slot_bytes = "2MiB"

[[tiers]]
kind = "disk"
directory = "/data/kvstore"
capacity = "1TiB"

[server]
socket = "/run/kvstore.sock"
```

```bash
kvstore config show --config kvstore.toml     # every effective value, with its source
kvstore config check kvstore.toml             # every error of a file; opens nothing
kvstore config schema                         # JSON Schema, for editors
kvstore config reload                         # make a running sidecar read its file again
```

**Units.** A *size* is a number of bytes or text with a unit: `4GiB`, `500MB` (KiB is 1,024 bytes,
kB 1,000). A *time* is a number of milliseconds or text: `250ms`, `1.5s`, `2m`, `1h`.

**Reload.** On SIGHUP, and on `kvstore config reload` (`POST /v1/reload`, for the administrator),
the sidecar reads its file again. If the file is valid, and all changed keys say *yes* below, the
changes take effect together. Otherwise nothing changes, and one line gives the reason: an error, or
a key that needs a restart. Environment variables and command-line options are read only at start.
Keys that say *engines* are read by engines at start. The sidecar does not use them.
"""


SGLANG_HEAD = """\
# Every argument of SGLang, and the names of pages

Generated from `kvstore/connectors/sglang/server_arguments.py` by `docs/generate.py`. A test fails if
this page is out of date, and another if the installed SGLang has an argument that the table lacks.
Made for SGLang 0.5.23.

A page is found only by servers whose arguments give it the same name (its namespace). Each argument of
SGLang's server is one of these:

- **in the name**: pages of servers with other values never meet.
- **in the name where set**: the same, but a server with SGLang's default keeps the name it always had.
  A value is compared as it was given: `--attention-backend fa3` and the default that chooses `fa3` have
  different names.
- **in the name where set, by contents**: the contents of the file or folder are compared, not its path.
- **refused**: SGLang's start, or the attach of the storage backend, ends with one line.
- **does not matter**: for the given reason.

An argument of a later release that the table lacks is in the name where set. SGLang's environment
variables (`SGLANG_*`) and code (`--trust-remote-code`, forward hooks, plugins) are not compared: if
they change the KV, change `revision` in the extra config with them.
"""  # noqa: E501


def sglang_page() -> str:
    """Return the text of sglang_arguments.md."""
    rows = [(f"`{name}`", group.verdict, group.reason) for name, group in sorted(VERDICTS.items())]
    return f"{SGLANG_HEAD}\n{_table(('argument', 'verdict', 'reason'), rows)}\n"


def cli_page() -> str:
    """Return the text of cli.md."""
    parts = [CLI_HEAD, "## Commands"]
    for path, command in sorted(_commands(typer.main.get_command(build_app()))):
        parts.append(f"### kvstore {path}\n\n{_paragraphs(command.help)}")
        kinds = get_type_hints(inspect.unwrap(command.callback))
        parts.append(f"```text\nkvstore {path} {_usage(command, kinds)}\n```")
        rows = [_option(p, kinds) for p in command.params if p.name != "help"]
        if rows:
            parts.append(_table(("option", "default", "meaning"), rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        if hasattr(command, "commands"):
            yield from _commands(command, full)
        else:
            yield full, command


def _usage(command: Any, kinds: Mapping[str, Any]) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    needed = [p for p in command.params if p.param_type_name == "option" and p.required]
    words = [f"{max(p.opts, key=len)} {_value_of(p, kinds)}" for p in needed]
    words += [_argument(p) for p in arguments]
    return " ".join(["[OPTIONS]", *words])


def _argument(param: Any) -> str:
    return str(param.metavar or param.name.upper() + ("..." if param.nargs < 0 else ""))


def _value_of(param: Any, kinds: Mapping[str, Any]) -> str:
    """Return a word for an option's value, from the annotation in its function.

    The annotation is the stable source: typer has kept the type in several places.
    """
    if param.metavar:
        return str(param.metavar)
    kind = str(kinds.get(param.name, ""))
    words = (("Path", "PATH"), ("str", "TEXT"), ("int", "NUMBER"), ("float", "NUMBER"))
    return next((word for name, word in words if name in kind), "VALUE")


def _option(param: Any, kinds: Mapping[str, Any]) -> tuple[str, str, str]:
    if param.param_type_name == "argument":
        return f"`{_argument(param)}`", _default(param), param.help or ""
    names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len, reverse=True))
    value = "" if param.is_flag else f" {_value_of(param, kinds)}"
    return names + value, _default(param), param.help or ""


def _default(param: Any) -> str:
    default = param.default
    if param.required:
        return "required"
    if default is None or default == "" or default is False or callable(default):
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(f"`{each}`" for each in default)
    return f"`{default}`"


def configuration_page() -> str:
    """Return the text of configuration.md."""
    parts = [CONFIGURATION_HEAD]
    for name, model in sections().items():
        parts.append(f"## [{name}]\n\n{_paragraphs(model.__doc__)}")
        parts.append(_keys(list(config_keys(model, name)), name, environment=True))
    parts.append(f"## [[tiers]]\n\n{_paragraphs(TierSettings.__doc__)}")
    parts.append(
        "In the environment, the whole list is one value, `KVSTORE_TIERS`, as JSON. Every tier has "
        "these keys:"
    )
    parts.append(_keys(list(config_keys(TierSettings)), "tiers"))
    for kind, model in tier_models().items():
        own = [key for key in config_keys(model) if key.path not in common_tier_keys()]
        parts.append(f'### kind = "{kind}"\n\n{_paragraphs(model.__doc__)}')
        parts.append(_keys(own, "tiers"))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _keys(keys: Sequence[ConfigKey], section: str, *, environment: bool = False) -> str:
    rows = []
    for key in keys:
        name = key.path.rpartition(".")[2]
        default = "required" if key.default is None else f"`{key.default}`"
        meaning = key.meaning or "Name of the tier in metrics and messages."
        row = [f"`{name}`", default, key.unit, _reloads(section, name), meaning]
        rows.append([*row, f"`{key.environment}`"] if environment else row)
    head = ["key", "default", "unit", "reloads", "meaning"]
    return _table([*head, "environment"] if environment else head, rows)


def _reloads(section: str, key: str) -> str:
    if section in ENGINE_SECTIONS:
        return "engines"
    return "yes" if f"{section}.{key}" in RELOADABLE else "no"


def _paragraphs(text: str | None) -> str:
    """Return a docstring as paragraphs of one line each."""
    return "\n\n".join(
        " ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n")
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "sglang_arguments.md": sglang_page,
}


def stale() -> list[str]:
    """Return the pages whose text has changed."""
    return [
        name
        for name, make in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text() != make()
    ]


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--check"]:
        for name in stale():
            print(f"docs/{name} is out of date; run python docs/generate.py")
        return 1 if stale() else 0
    for name in stale():
        (HERE / name).write_text(PAGES[name]())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
