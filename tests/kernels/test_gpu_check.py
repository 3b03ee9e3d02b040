"""`bench/gpu_check.py` completes on a machine without a GPU, and reports what it skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_completes_on_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "bench/gpu_check.py", "--quick", "--json", str(tmp_path / "found.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: no CUDA device" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["checks"]) > 50
    assert all(check["ok"] for check in found["checks"])
    assert found["copies"]
    assert found["engine"]
