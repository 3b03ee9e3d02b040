"""What the documents say is so: configurations are right, commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.cli import COMMANDS, main
from kvstore.config.settings import Settings, validate
from kvstore.store.assembly import check_settings, tier_module

ROOT = Path(__file__).parents[2]
GROUPS = {"doctor", "bench", "config"}
"""Commands that have commands of their own."""
RECORDED = "kvstore_hit_rate"
"""In the names of recorded series."""
DOCS = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_file_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([\w/.-]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_configuration_a_page_shows_is_right(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        settings = Settings.load(file, environment=False)
        check_settings(settings)
        for tier in settings.tiers:
            validate(tier_module(tier.kind).Config, tier.model_extra or {}, tier.kind)


def test_metrics_are_called_the_same_on_every_page() -> None:
    """`tests/service/test_observing.py` holds observing.md against what is really told. Those that
    vLLM tells are others."""
    name = re.compile(r"(?<!vllm:)\bkvstore_[a-z0-9_]+")
    right = set(name.findall((ROOT / "docs" / "observing.md").read_text()))
    pages = [*DOCS, ROOT / "README.md", *(ROOT / "deploy").rglob("*.yml")]
    for page in pages:
        for found in set(name.findall(page.read_text())) - {
            "kvstore_hit_rate"
        }:  # of recorded names
            plain = re.sub("_(bucket|sum|count)$", "", found)
            assert {found, plain} & right, f"{page.name}: {found}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_command_a_page_shows_exists_with_its_options(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            words = line.partition("#")[0].split()
            if len(words) < 2 or words[0] != "kvstore":
                continue
            own = words[1].startswith("--")
            assert own or words[1] in {*COMMANDS, "unpin"}, line
            group = [] if own else words[1:3] if words[1] in GROUPS else words[1:2]
            assert main([*group, "--help"]) == 0
            help_text = capsys.readouterr().out
            for word in words[1:]:
                assert not word.startswith("--") or word in help_text, line
