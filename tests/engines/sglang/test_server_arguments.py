"""The table of SGLang's arguments against the arguments that the installed SGLang has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hicache_rig import absent, driver

from kvstore.connectors.sglang.model_identity import KV_ARGUMENTS, revision_of
from kvstore.connectors.sglang.server_arguments import (
    CONTENTS,
    GROUPS,
    NAMED,
    NO_EFFECT,
    WHERE_SET,
    set_arguments,
)
from kvstore.connectors.sglang.settings import backend_settings

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(bool(absent()), reason=absent())]


@pytest.fixture(scope="module")
def record() -> Any:
    """The class of SGLang's server arguments."""
    driver()
    from sglang.srt.server_args import ServerArgs

    return ServerArgs


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return str(tmp_path)


def of(verdict: str) -> list[str]:
    return [name for group in GROUPS if group.verdict == verdict for name in group.names]


def another(value: Any) -> Any:
    """A value that differs from this default. SGLang checks values later than here."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


def revisions(record: Any, model: str, names: list[str], value: Any = None) -> dict[str, str]:
    """The revision with each of these arguments set, the others at their defaults."""
    settings = backend_settings({})
    found = {}
    for name in names:
        default = getattr(record(model_path=model), name)
        args = record(model_path=model, **{name: another(default) if value is None else value})
        found[name] = revision_of(settings, args)
    return found


def test_every_argument_of_the_installed_sglang_has_a_verdict(record: Any) -> None:
    listed = [name for group in GROUPS for name in group.names]
    assert sorted(listed) == sorted(set(listed)), "one verdict each"
    assert set(record.__struct_fields__) - set(listed) == set(), "SGLang has them, the table not"
    assert set(listed) - set(record.__struct_fields__) == set(), "SGLang has them no longer"


def test_arguments_that_are_set_give_another_name_each(record: Any, model: str) -> None:
    plain = revision_of(backend_settings({}), record(model_path=model))
    names = [name for name in (*of(WHERE_SET), *KV_ARGUMENTS) if name != "load_format"]
    found = revisions(record, model, names)
    assert len({plain, *found.values()}) == 1 + len(names)


def test_contents_of_files_give_another_name_each(record: Any, model: str, tmp_path: Path) -> None:
    plain = revision_of(backend_settings({}), record(model_path=model))
    for name in of(CONTENTS):
        path = tmp_path / f"{name}.safetensors"
        value = [str(path)] if name == "lora_paths" else str(path)
        found = set()
        for content in (b"one", b"two"):
            path.write_bytes(content)
            found |= set(revisions(record, model, [name], value).values())
        path.unlink()
        assert len({plain, *found}) == 3, name


def test_other_arguments_leave_the_name(record: Any, model: str) -> None:
    plain = revision_of(backend_settings({}), record(model_path=model))
    assert set(revisions(record, model, of(NO_EFFECT)).values()) == {plain}
    by_other_means = set(of(NAMED)) - {*KV_ARGUMENTS, "model_path"}
    assert set(revisions(record, model, sorted(by_other_means)).values()) == {plain}


def test_arguments_of_a_running_server_are_those_that_the_user_gave(
    record: Any, tmp_path: Path
) -> None:
    """SGLang resolves defaults at its start, and keeps what was given."""
    from engine_rig import write_model

    args = record(model_path=str(write_model(tmp_path, 1)), device="cpu", page_size=16)
    given = set_arguments(args)
    args.resolve_once()
    assert (
        set_arguments(args)
        == given
        == {
            "model_path": str(tmp_path),
            "device": "cpu",
            "page_size": 16,
        }
    )
