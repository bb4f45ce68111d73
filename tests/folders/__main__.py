"""`python -m tests.folders`: every published folder walked, in a minute of a core.

Writes benchmarks/results/accuracy/folders.json, which docs/families.md shows (`python benchmarks/render.py`).
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
# `python -m` puts the checkout's folder on the path, where transformers would take our `kernels` for the package it knows
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "fuzz")]

import own_tree  # noqa: E402

own_tree.use()
import torch  # noqa: E402
import transformers  # noqa: E402
from published import FAMILIES  # noqa: E402
from walking import Walk, row  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "accuracy" / "folders.json"


def main() -> int:
    """Walk all and write their rows; 1 where a step failed."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows, failed = [], 0
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            walk = Walk(family, Path(folder))
            faults = {step: why for step, why in walk.take().items() if why}
            rows.append(row(family, walk, faults))
        failed += bool(faults)
        print(f"{family}: {faults or 'ok'}", file=sys.stderr, flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    OUT.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **versions, "rows": rows}, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
