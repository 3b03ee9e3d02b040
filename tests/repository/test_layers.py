"""The count of rooms, floors and circles (bench/layers.py), and that no circle comes back."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "bench" / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["layers"] = module
    spec.loader.exec_module(module)
    return module


def write(package: Path, **modules: str) -> None:
    for name, text in modules.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (package / "__init__.py").touch()


def test_no_modules_import_each_other_in_a_circle(layers: ModuleType) -> None:
    modules = layers.module_graph(ROOT / "kvstore")
    assert layers.circles(modules) == []
    assert layers.circles(layers.room_graph(modules, ROOT / "kvstore")) == []


def test_a_circle_is_found_through_functions_and_type_checking(
    layers: ModuleType, tmp_path: Path
) -> None:
    package = tmp_path / "made"
    write(
        package,
        low__a="def f():\n    from made.low import b\n",
        low__b="if TYPE_CHECKING:\n    from made.low.c import X\n",
        low__c="import made.low.a\n",
        high__d="from made.low import a\n",
    )
    modules = layers.module_graph(package)
    assert layers.circles(modules) == [["made.low.a", "made.low.b", "made.low.c"]]
    rooms = layers.room_graph(modules, package)
    assert rooms == {"made.low": set(), "made.high": {"made.low"}}
    assert layers.floors(rooms) == {"made.low": 0, "made.high": 1}


def test_rooms_that_import_each_other_share_a_floor(layers: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "made"
    write(
        package,
        x__a="import made.y.b\n",
        y__b="import made.x.a\n",
        base="",
        y__c="import made.base\n",
    )
    rooms = layers.room_graph(layers.module_graph(package), package)
    assert layers.circles(rooms) == [["made.x", "made.y"]]
    assert layers.floors(rooms) == {"made.base": 0, "made.x": 1, "made.y": 1}
