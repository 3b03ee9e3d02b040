"""Shell completion: the printed script is for the right shell, and it completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PATH with `kvstore`, and with a shell of each name.

    The completion finds its shell by the process name. A shell that is not installed is bash under
    that name.
    """
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "kvstore"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore "$@"\n')
    command.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    for shell in SHELLS:
        if shutil.which(shell) is None:
            shutil.copy(bash, folder / shell)
    return f"{folder}:/usr/bin:/bin"


def run(path: str, *argv: str, **environment: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        argv,
        env={"PATH": path, "PYTHONPATH": str(root), "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_for_the_calling_shell(path: str, shell: str) -> None:
    # Another command must follow: else the shell becomes `kvstore`, and there is no shell to find.
    script = run(path, shell, "-c", "kvstore --show-completion; true")
    marks = {"bash": "COMP_WORDS", "zsh": "#compdef kvstore", "fish": "complete --command kvstore"}
    assert marks[shell] in script
    assert f"_KVSTORE_COMPLETE=complete_{shell}" in script


def test_bash_completes(path: str) -> None:
    program = """
        eval "$(kvstore --show-completion)"
        complete -p kvstore
        for words in "kvstore con" "kvstore config s" "kvstore serve --disk-"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _kvstore_completion kvstore
            echo "${COMPREPLY[@]}"
        done
    """
    how, *lines = run(path, "bash", "-c", program).splitlines()
    assert "_kvstore_completion kvstore" in how
    assert lines == ["config", "show schema", "--disk-capacity"]


def test_completion_for_zsh_and_fish(path: str) -> None:
    """Makes the calls of their scripts, without the shell's own variables."""
    zsh = run(
        path,
        "kvstore",
        _KVSTORE_COMPLETE="complete_zsh",
        _TYPER_COMPLETE_ARGS="kvstore config s",
    )
    assert '"show":' in zsh
    assert '"schema":' in zsh
    assert '"reload"' not in zsh
    fish = {"_KVSTORE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    answer = run(path, "kvstore", **fish, _TYPER_COMPLETE_ARGS="kvstore un")
    assert answer.startswith("unpin\t")


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".bash_completions/kvstore.sh"),
        ("zsh", ".zfunc/_kvstore"),
        ("fish", ".config/fish/completions/kvstore.fish"),
    ],
)
def test_it_installs_itself(path: str, tmp_path: Path, shell: str, place: str) -> None:
    run(path, shell, "-c", "kvstore --install-completion; true", HOME=str(tmp_path))
    assert "_KVSTORE_COMPLETE" in (tmp_path / place).read_text()
