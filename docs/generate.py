"""Writes cli.md from the command line itself, and configuration.md from the configuration's models.

python docs/generate.py            # writes both
python docs/generate.py --check    # exit code 1 when one is stale
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import typer

from kvstore.cli import build_app
from kvstore.cli.common.config_keys import Knob, common_tier_keys, knobs, sections, tier_models
from kvstore.config.settings import TierSettings
from kvstore.service.reload import ENGINES, RELOADS

HERE = Path(__file__).parent

CLI_HEAD = """\
# The command line

Made from the commands themselves by `docs/generate.py`; a test says when it is stale.

```bash
kvstore --help
kvstore serve --help
```

Every command that prints results takes `--json`: one JSON object on stdout, and nothing else there.
Progress and warnings go to stderr, and only progress where stderr is a terminal. `KVSTORE_*` and
configuration files: [configuration.md](configuration.md).

## Exit codes

| Code | Meaning |
| --- | --- |
| 0 | done |
| 1 | the command did its work, and the answer is no: a frame is bad, not all is pinned, a tier cannot be listed, a check or a request failed. The command's own text says which |
| 2 | a mistake in the command line or the configuration, or what it needs is not there (no sidecar, no extra installed): one line on stderr, and nothing was done |
| 130 | interrupted by Ctrl-C |
| 141 | whoever read its output left (`kvstore ... \\| head`) |

## Completion

For bash, zsh and fish, in the shell that is to complete:

```bash
kvstore --install-completion
kvstore --show-completion
```

The second prints what the first installs.
"""  # noqa: E501

CONFIGURATION_HEAD = """\
# Configuration

Made from the configuration's models by `docs/generate.py`; a test says when it is stale.

One tree, for the sidecar, the engines and the connectors. Later sources win:

1. the defaults below,
2. a TOML file (`--config FILE`),
3. the environment: `KVSTORE_` and the path in the tree joined by two underscores, as
   `KVSTORE_L2__BYTES=4GiB`; lists and tables as JSON, as `KVSTORE_TIERS='[{"kind": "memory"}]'`,
4. the command line: a command's own options, and `--set KEY=VALUE` for any key.

Tables are laid over one another key by key, lists are replaced whole. A key that is none is an
error that names the nearest right one.

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
kvstore config show --config kvstore.toml     # every value in force, and where it comes from
kvstore config check kvstore.toml             # every mistake of a file; nothing is opened for it
kvstore config schema                         # JSON Schema, for editors
kvstore config reload                         # have a running sidecar read its file anew
```

**Units.** A *size* is a number of bytes or text with a unit: `4GiB`, `500MB` (KiB is 1,024 bytes,
kB 1,000). A *time* is a number of milliseconds or text: `250ms`, `1.5s`, `2m`, `1h`.

**Reload.** On SIGHUP, and on `kvstore config reload` (`POST /v1/reload`, for the administrator),
the sidecar reads its file again. If all of it is right, and only keys changed that say *yes* below,
all of them take effect at once; otherwise nothing changes, and one line says why: what is wrong, or
that a restart is needed. Environment and command line are those of its start. Keys that say
*engines* are read by engines when they start; the sidecar has no use for them.
"""


def cli_page() -> str:
    """The text of cli.md."""
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
    """A word for an option's value, by the annotation of its function: typer has kept it in several
    places."""
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
        return "needed"
    if default is None or default == "" or default is False or callable(default):
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(f"`{each}`" for each in default)
    return f"`{default}`"


def configuration_page() -> str:
    """The text of configuration.md."""
    parts = [CONFIGURATION_HEAD]
    for name, model in sections().items():
        parts.append(f"## [{name}]\n\n{_paragraphs(model.__doc__)}")
        parts.append(_keys(list(knobs(model, name)), name, environment=True))
    parts.append(f"## [[tiers]]\n\n{_paragraphs(TierSettings.__doc__)}")
    parts.append(
        "In the environment the whole list is one value, `KVSTORE_TIERS`, as JSON. Keys that a "
        "tier of any kind has:"
    )
    parts.append(_keys(list(knobs(TierSettings)), "tiers"))
    for kind, model in tier_models().items():
        own = [knob for knob in knobs(model) if knob.path not in common_tier_keys()]
        parts.append(f'### kind = "{kind}"\n\n{_paragraphs(model.__doc__)}')
        parts.append(_keys(own, "tiers"))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _keys(of: Sequence[Knob], section: str, *, environment: bool = False) -> str:
    rows = []
    for knob in of:
        key = knob.path.rpartition(".")[2]
        default = "needed" if knob.default is None else f"`{knob.default}`"
        meaning = knob.meaning or "Its name in locations and metrics."
        row = [f"`{key}`", default, knob.unit, _reloads(section, key), meaning]
        rows.append([*row, f"`{knob.environment}`"] if environment else row)
    head = ["key", "default", "unit", "reloads", "meaning"]
    return _table([*head, "environment"] if environment else head, rows)


def _reloads(section: str, key: str) -> str:
    if section in ENGINES:
        return "engines"
    return "yes" if f"{section}.{key}" in RELOADS else "no"


def _paragraphs(text: str | None) -> str:
    """A docstring as paragraphs of one line each."""
    return "\n\n".join(
        " ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n")
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES = {"cli.md": cli_page, "configuration.md": configuration_page}


def stale() -> list[str]:
    """Pages that are not what they would be made now."""
    return [
        name
        for name, make in PAGES.items()
        if not (HERE / name).exists() or (HERE / name).read_text() != make()
    ]


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--check"]:
        for name in stale():
            print(f"docs/{name} is stale; python docs/generate.py writes it anew")
        return 1 if stale() else 0
    for name in stale():
        (HERE / name).write_text(PAGES[name]())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
