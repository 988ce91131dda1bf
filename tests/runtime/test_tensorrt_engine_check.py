"""The GPU check's part about engines says what it could not measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "engine_check.py"


def test_a_machine_without_gpu_is_not_measured() -> None:
    """With an empty list of visible devices there is no GPU anywhere."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert run.stdout.startswith("engines: not measured: no ")
