"""No two tiers may use one directory, or one inside the other: `config check` and `serve`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sidecar_rig import run_command

from kvstore.cli import main

Make = Callable[[Path], tuple[object, object]]


def same(root: Path) -> tuple[object, object]:
    return root / "a", root / "a"


def other_spelling(root: Path) -> tuple[object, object]:
    return root / "a", f"{root}//b/../a/"


def relative(root: Path) -> tuple[object, object]:
    return root / "a", "./a"


def by_symlink(root: Path) -> tuple[object, object]:
    (root / "link").symlink_to(root / "a")
    return root / "a", root / "link"


def by_symlink_to_a_parent(root: Path) -> tuple[object, object]:
    (root / "link").symlink_to(root)
    return root / "a", root / "link" / "a"


def inside(root: Path) -> tuple[object, object]:
    return root / "a", root / "a" / "b" / "c"


def around(root: Path) -> tuple[object, object]:
    return root / "a" / "b", root / "a"


def inside_by_symlink(root: Path) -> tuple[object, object]:
    (root / "a").mkdir()
    (root / "link").symlink_to(root / "a")
    return root / "a", root / "link" / "b"


def one_of_several(root: Path) -> tuple[object, object]:
    return [root / "x", root / "a"], [root / "y", root / "a" / "b"]


def by_bind_mount(root: Path) -> tuple[object, object]:
    (root / "a").mkdir()
    (root / "bound").mkdir()
    command = ["mount", "--bind", str(root / "a"), str(root / "bound")]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    return root / "a", root / "bound" / "b"


SHARED = [
    same,
    other_spelling,
    relative,
    by_symlink,
    by_symlink_to_a_parent,
    inside,
    around,
    inside_by_symlink,
    one_of_several,
    by_bind_mount,
]


def table(name: str, directory: object) -> str:
    places = directory if isinstance(directory, list) else [directory]
    text = ", ".join(f'"{place}"' for place in places)
    return f'[[tiers]]\nkind = "disk"\nname = "{name}"\ncapacity = "64MiB"\ndirectory = [{text}]\n'


@pytest.mark.parametrize("make", SHARED)
def test_a_directory_of_two_tiers_is_one_line_that_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make(tmp_path)
    # A tier before them that is invalid itself: the tiers are numbered as in the file.
    wrong = '[[tiers]]\nkind = "redis"\n'
    try:
        for before, errors in (("", 1), (wrong, 2)):
            file = tmp_path / "kvstore.toml"
            file.write_text(before + table("near", first) + table("far", second))
            assert main(["config", "check", str(file)]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == errors, lines
            (line,) = [line for line in lines if "near" in line]
            assert f"tiers.{errors}" in line
            assert "'near'" in line
            assert "'far'" in line
            assert "its own directory" in line
    finally:
        subprocess.run(["umount", str(tmp_path / "bound")], capture_output=True)


@pytest.mark.parametrize("make", [inside, by_symlink])
def test_serve_refuses_them_and_creates_nothing(tmp_path: Path, make: Make) -> None:
    first, second = make(tmp_path)
    file = tmp_path / "kvstore.toml"
    file.write_text(table("near", first) + table("far", second))
    flags = ("--config", str(file), "--socket", str(tmp_path / "s"), "--port", "0", "--l2", "8MiB")
    code, out, err = run_command(tmp_path, "serve", *flags)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvstore: ")
    assert "'near'" in line
    assert "'far'" in line
    assert not (tmp_path / "a").exists()


def test_one_directory_of_a_tier_inside_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(table("near", [tmp_path / "a", tmp_path / "a" / "b"]))
    assert main(["config", "check", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tiers.0" in line
    assert "'near'" in line


def test_neighbours_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    file = tmp_path / "kvstore.toml"
    pairs = [("a", "ab"), ("x/a", "x/b"), ("a", "a/up/c")]
    for first, second in pairs:
        file.write_text(table("near", tmp_path / first) + table("far", tmp_path / second))
        assert main(["config", "check", str(file)]) == 0, capsys.readouterr().err
