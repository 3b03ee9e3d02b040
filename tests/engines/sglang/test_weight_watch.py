"""SGLang's own methods that change the weights are noticed, before they begin.

They are called on objects that they cannot work with. test_weight_updates.py has whole engines.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from hicache_rig import absent, driver

from kvstore.connectors.sglang import weight_watch
from kvstore.connectors.sglang.weight_watch import RELEASE, WATCHED, ProcessWeights, WeightWatch
from kvstore.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(bool(absent()), reason=absent())]

METHODS = [(module, owner, m) for module, owner, methods in WATCHED for m in methods]
OURS = '{"backend_name": "kvstore", "module_path": "kvstore.connectors.sglang"}'


def class_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.fixture(autouse=True)
def a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were never updated, and SGLang's methods as they are without kvstore."""
    driver()
    monkeypatch.setattr(weight_watch, "_process", ProcessWeights())
    for module, owner, method in METHODS:
        found = getattr(class_of(module, owner), method)
        monkeypatch.setattr(class_of(module, owner), method, getattr(found, "__wrapped__", found))


def server(**arguments: Any) -> Any:
    """Arguments of a server that runs in this process."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    given = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": OURS}
    args = ServerArgs(model_path="dummy", **{**given, **arguments})
    set_global_server_args_for_scheduler(args)
    return args


def call(method: str, *arguments: Any) -> None:
    """Call one of SGLang's methods on an object without a model."""
    ((module, owner),) = [(m, o) for m, o, name in METHODS if name == method]
    with pytest.raises((AttributeError, TypeError)):
        getattr(class_of(module, owner), method)(SimpleNamespace(), *arguments)


@pytest.mark.parametrize("method", [m for _, _, m in METHODS if m != RELEASE])
def test_an_update_ends_sharing(method: str, caplog: pytest.LogCaptureFixture) -> None:
    args = server()
    watch = WeightWatch("", args)
    assert watch.ended() == ""
    call(method, *[None] * (0 if method == "begin_weight_update" else 1))
    assert [watch.ended(), watch.ended()] == [method, method]
    assert caplog.text.count("neither found nor saved") == 1
    with pytest.raises(ConfigError, match=rf"updated after the server's start \({method}\)"):
        WeightWatch("", args)
    assert WeightWatch("second", args).ended() == ""
    call("update_weights_from_tensor", None)
    with pytest.raises(ConfigError, match="a string other than 'second'"):
        WeightWatch("second", args)
    assert WeightWatch("third", args).ended() == ""


def test_another_weight_version_ends_sharing_and_the_first_one_again_as_well() -> None:
    from sglang.srt.runtime_context import get_context

    args = server()
    watch = WeightWatch("first", args)
    get_context().override("test", weight_version="2")
    assert watch.ended() == "weight_version = '2'"
    get_context().override("test", weight_version="default")
    assert watch.ended()
    with pytest.raises(ConfigError, match="other than 'first'"):
        WeightWatch("first", args)


@pytest.mark.parametrize(
    ("tags", "saver", "copied", "lost"),
    [
        (None, True, False, True),
        (["weights"], True, False, True),
        (["kv_cache"], True, False, False),
        (["weights"], True, True, False),
        (["weights"], False, False, False),
    ],
)
def test_weights_released_without_a_copy_are_lost(
    tags: list[str] | None, saver: bool, copied: bool, lost: bool
) -> None:
    watch = WeightWatch("", server(enable_memory_saver=saver, enable_weights_cpu_backup=copied))
    call(RELEASE, SimpleNamespace(tags=tags))
    assert bool(watch.ended()) == lost


@pytest.mark.parametrize(
    "started",
    [
        {"hicache_storage_backend": None},
        {"hicache_storage_backend": "file"},
        {"hicache_storage_backend_extra_config": '{"module_path": "another"}'},
    ],
)
def test_a_backend_attached_at_run_time_needs_a_revision(started: dict[str, Any]) -> None:
    args = server(**started)
    with pytest.raises(ConfigError, match="possibly updated before kvstore was attached"):
        WeightWatch("", args)
    assert WeightWatch("r7", args).ended() == ""
    assert WeightWatch("r7", args).ended() == "", "no update since"


def test_an_sglang_with_other_methods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, owner, method = METHODS[0]
    monkeypatch.delattr(class_of(module, owner), method)
    with pytest.raises(ConfigError, match="cannot see updates of its weights"):
        WeightWatch("", server())
