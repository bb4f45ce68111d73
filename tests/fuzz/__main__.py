"""`python -m tests.fuzz --minutes N`: bend files and kill commands for so long; writes benchmarks/results/fuzz/long.json.

docs/security.md shows that table (`python benchmarks/render.py`). Inputs that fail are kept in tests/fuzz/found.json, which the
tests run again.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# `python -m` puts the checkout's folder on the path, where transformers would take our `kernels` for the package it knows
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
sys.path.insert(0, str(Path(__file__).parent))

import own_tree  # noqa: E402

own_tree.use()
from lowq_cli import hf  # noqa: E402

hf.leave_out()

from campaign import run  # noqa: E402

if __name__ == "__main__":
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("--minutes", type=float, default=10)
    asked.add_argument("--bends", type=int, default=200_000, help="end after so many bent files")
    asked.add_argument("--kills", type=int, default=2_000, help="and so many stopped runs")
    asked.add_argument("--seed", type=int, default=None, help="of the first bend; the time otherwise")
    asked.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fuzz" / "long.json")
    asked.add_argument("--jobs", type=int, default=1, help="processes, each with its share")
    asked.add_argument("--add", action="store_true", help="add to the result that --out holds")
    given = asked.parse_args()
    sys.exit(run(given.minutes * 60, given.bends, given.kills, given.seed, given.out, given.jobs, given.add))
