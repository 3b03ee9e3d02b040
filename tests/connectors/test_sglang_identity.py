"""What names the weights of an SGLang server: its files and arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.sglang.model_identity import revision_of
from kvstore.connectors.sglang.settings import backend_settings
from kvstore.connectors.sglang.weight_watch import WeightWatch
from kvstore.errors import ConfigError

SILENT = backend_settings({})


def folder(path: Path, content: bytes) -> str:
    """A folder with one file of weights."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder(tmp_path / "model", bytes(1000))


def revision(model: str, settings: Any = SILENT, **arguments: Any) -> str:
    return revision_of(settings, SimpleNamespace(model_path=model, **arguments))


def test_a_server_with_defaults_keeps_its_name(model: str) -> None:
    """Names that earlier releases gave: the digest has three arguments and eight digits."""
    defaults = {"dtype": "auto", "quantization": None, "json_model_override_args": "{}"}
    weights, _, digest = revision(model, **defaults).partition("-")
    assert weights
    assert digest == "3fb2d7b8"


def test_draft_models_and_adapters_are_known_by_their_weights(model: str, tmp_path: Path) -> None:
    draft, adapter = tmp_path / "draft", tmp_path / "adapter"
    folder(draft, b"one")
    folder(adapter, b"one")
    cases: list[tuple[Path, dict[str, Any]]] = [
        (draft, {"speculative_draft_model_path": str(draft)}),
        (adapter, {"lora_paths": [f"a={adapter}"]}),
        (adapter, {"lora_paths": {"a": str(adapter)}}),
        (adapter, {"lora_paths": [{"lora_name": "a", "lora_path": str(adapter)}]}),
        (adapter, {"lora_paths": [SimpleNamespace(lora_name="a", lora_path=str(adapter))]}),
    ]
    names = {revision(model)}
    for path, arguments in cases:
        folder(path, b"one")
        one = revision(model, **arguments)
        folder(path, b"two")
        two = revision(model, **arguments)
        assert one != two
        assert one not in names - {revision(model, lora_paths=[f"a={adapter}"])}
        names.add(two)
        folder(path, b"one")
        assert revision(model, **arguments) == one
    assert revision(model, lora_paths=[f"a={adapter}"]) != revision(
        model, lora_paths=[f"b={adapter}"]
    )


def test_an_argument_of_a_later_release_is_in_the_name(model: str) -> None:
    assert revision(model, some_later_argument=2) != revision(model)
    assert revision(model, some_later_argument={"b": 1, "a": {3, 1}}) == revision(
        model, some_later_argument={"a": {1, 3}, "b": 1}
    )


def test_a_users_revision_stands_beside_the_arguments(model: str, tmp_path: Path) -> None:
    said = backend_settings({"revision": "r7"})
    assert revision(model, said) == "r7"
    assert revision(model, said, quantization="fp8") != revision(model, said, quantization="awq")
    assert revision(model, said, attention_backend="fa3").startswith("r7-")
    empty = str(tmp_path / "empty")
    Path(empty).mkdir()
    with pytest.raises(ConfigError, match=r'has no weights.*set "revision"'):
        revision(model, speculative_draft_model_path=empty)
    assert revision(model, said, speculative_draft_model_path=empty).startswith("r7-")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_format", "remote_instance"),
        ("load_format", "presharded"),
        ("weight_cache_mode", "client"),
        ("delete_ckpt_after_loading", True),
    ],
)
def test_weights_of_another_origin_need_a_revision(model: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f'with {name} = {value!r}; set "revision"'):
        revision(model, **{name: value})
    said = backend_settings({"revision": "r7"})
    assert revision(model, said, **{name: value}).partition("-")[0] == "r7"


def test_a_file_that_cannot_be_read_is_one_line(model: str) -> None:
    with pytest.raises(ConfigError) as told:
        revision(model, quantization_param_path="/nowhere/scales.json")
    assert str(told.value) == (
        "cannot read --quantization-param-path '/nowhere/scales.json': No such file or directory"
    )


def test_outside_a_server_weights_do_not_change() -> None:
    assert WeightWatch("", None).ended() == ""
