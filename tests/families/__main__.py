"""`python -m tests.families`: every causal language model of the installed transformers, tiny and random, quantized to 8 bits.

Writes benchmarks/results/accuracy/families.json, which docs/families.md shows (`python benchmarks/render.py`). Ten minutes on
two cores. Names after it: only those; the rows of the others stay.
"""

import json
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
# `python -m` puts the checkout's folder on the path, where transformers would take our `kernels` for the package it knows
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path.insert(0, str(Path(__file__).parent))

from family_judge import judge  # noqa: E402
from tiny import model_types  # noqa: E402
from transformers.utils import logging  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "accuracy" / "families.json"


def main(named: list[str]) -> None:
    """Judge the named families, or all, and write their rows."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for family in named or model_types():
        verdict = judge(family)
        print(f"{family}: {'; '.join(verdict.unmet) or 'ok'}", file=sys.stderr, flush=True)
        rows.append(verdict.to_json())
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "rows": rows,
    }
    if named:
        result = json.loads(OUT.read_text())
        new = {row["family"]: row for row in rows}
        result["rows"] = [new.get(row["family"], row) for row in result["rows"]]
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
