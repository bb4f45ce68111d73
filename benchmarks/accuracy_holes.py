"""What the accuracy tables lack: every cell that a script would measure and its result file has no row for.

    python benchmarks/accuracy_holes.py

The scripts fill them with --missing, several processes side by side with --shard 0,4 ... --shard 3,4.
"""

import argparse
from collections.abc import Callable, Iterator

import accuracy
import accuracy_bpw
import accuracy_calibrated
import accuracy_gptqmodel
from accuracy_rows import Row, missing

MODELS = ("base", "story")
LEARNT, ROTATED = ["--method", "learn", "--bits", "3,2,1"], ["--rotate", "--method", "gptq", "--bits", "4,3,2"]
Cells = Callable[[str, argparse.Namespace], Iterator[Row]]
SCRIPTS: tuple[tuple[str, argparse.ArgumentParser, Cells, list[str]], ...] = (
    ("accuracy.py", accuracy.flags(), accuracy.cells, []),
    ("accuracy_calibrated.py", accuracy_calibrated.flags(), accuracy_calibrated.cells, []),
    ("accuracy_calibrated.py", accuracy_calibrated.flags(), accuracy_calibrated.cells, LEARNT),
    ("accuracy_calibrated.py", accuracy_calibrated.flags(), accuracy_calibrated.cells, ROTATED),
    ("accuracy_gptqmodel.py", accuracy_gptqmodel.flags(), accuracy_gptqmodel.cells, []),
    ("accuracy_bpw.py", accuracy_bpw.flags(), accuracy_bpw.cells, []),
)
ABOUT = ("model", "method", "stored", "part", "bits", "group", "target")


def main() -> None:
    """Print a line per missing cell."""
    for name, flags, cells, chosen in SCRIPTS:
        args = flags.parse_args(["--models", ".", "--data", ".", *chosen])
        everything = [cell for model in MODELS for cell in cells(model, args)]
        lacking = missing(everything, args.out)
        print(f"{' '.join([name, *chosen])}: {len(lacking)} of {len(everything)} cells missing")
        for cell in lacking:
            print("  " + ", ".join(f"{k} {cell[k]}" for k in ABOUT if k in cell))


if __name__ == "__main__":
    main()
