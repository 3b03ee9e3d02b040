"""The pages that are made from the code are what the code says now."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_no_page_is_stale(generate: ModuleType) -> None:
    assert generate.stale() == [], "python docs/generate.py writes them anew"


def test_a_stale_page_is_told_and_written_anew(
    generate: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "HERE", tmp_path)
    (tmp_path / "cli.md").write_text("old")
    assert generate.main(["--check"]) == 1
    assert "docs/cli.md is out of date" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    for name in generate.PAGES:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


def test_the_pages_name_every_command_and_key(generate: ModuleType) -> None:
    cli = (DOCS / "cli.md").read_text()
    for name in ("ls", "clear", "stats", "config reload", "verify", "bench hitrate"):
        assert f"### kvstore {name}\n" in cli
    assert "`--watch`, `-w`" in cli
    page = (DOCS / "configuration.md").read_text()
    assert '| `ttl` | `"0"` | time | yes |' in page
    assert "`KVSTORE_LIMITS__WRITE_QUEUE_BLOCKS`" in page
    assert 'kind = "disk"' in page
    assert "Undefined" not in page
