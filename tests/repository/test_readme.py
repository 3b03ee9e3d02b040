"""What the README says is so: its example runs, its commands and files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.cli import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert example.count('"/tmp/kvstore-blocks"') == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace("/tmp/kvstore-blocks", str(tmp_path / "blocks")))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[bytes(4), bytes([1] * 4)]} ['l2', 'l2']\n"


def test_every_command_it_names_exists_and_none_is_left_out() -> None:
    named = set(re.findall(r"^\| `kvstore (\w+)", TEXT, re.MULTILINE))
    assert named == set(COMMANDS)


def test_every_file_it_names_exists() -> None:
    links = re.findall(r"\]\(([\w/.-]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
