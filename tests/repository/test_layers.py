"""bench/layers.py finds packages, layers and import cycles; the package has no cycle."""

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


def test_the_package_has_no_import_cycle(layers: ModuleType) -> None:
    modules = layers.module_graph(ROOT / "kvstore")
    assert layers.cycles(modules) == []
    assert layers.cycles(layers.package_graph(modules, ROOT / "kvstore")) == []


def test_a_cycle_is_found_through_functions_and_type_checking(
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
    assert layers.cycles(modules) == [["made.low.a", "made.low.b", "made.low.c"]]
    packages = layers.package_graph(modules, package)
    assert packages == {"made.low": set(), "made.high": {"made.low"}}
    assert layers.layers(packages) == {"made.low": 0, "made.high": 1}


def test_packages_that_import_each_other_share_a_layer(layers: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "made"
    write(
        package,
        x__a="import made.y.b\n",
        y__b="import made.x.a\n",
        base="",
        y__c="import made.base\n",
    )
    packages = layers.package_graph(layers.module_graph(package), package)
    assert layers.cycles(packages) == [["made.x", "made.y"]]
    assert layers.layers(packages) == {"made.base": 0, "made.x": 1, "made.y": 1}
