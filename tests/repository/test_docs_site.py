"""The documentation site: it builds without a warning, and leaves no page out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.nav import get_navigation

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    for name in (
        "kvstore.interface.BlockStore.match",
        "kvstore.tiers.base.Tier.read",
        "hash_tokens",
    ):
        assert name in api, f"{name} is not in the API reference"


def test_every_page_is_in_the_navigation() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    pages = get_navigation(get_files(config), config).pages
    listed = {page.file.src_uri for page in pages}
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
