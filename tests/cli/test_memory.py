"""Memory does not grow with the model. benchmarks/quantize_cost.py measures the same at full size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantize_cost.py"
MB = 1 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_a_deeper_model_takes_no_more_memory():
    shape = ["--hidden", "512", "--intermediate", "2048", "--vocab", "8192", "--runs", "1:rtn,12:rtn"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "memory", *shape, "--out", "-"], check=True, stdout=subprocess.PIPE, text=True
    )
    shallow, deep = json.loads(done.stdout)["rows"]
    assert deep["source_bytes"] - shallow["source_bytes"] > 75 * MB
    assert deep["above_import_bytes"] - shallow["above_import_bytes"] < 30 * MB
    assert deep["above_import_bytes"] < 200 * MB
    for row in (shallow, deep):
        assert row["peak_bytes"] < row["estimated_peak_bytes"]
