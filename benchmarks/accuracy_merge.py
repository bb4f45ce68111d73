"""Take up rows measured on another machine: benchmarks/results/accuracy/*.json.

    python benchmarks/accuracy_merge.py FILE.json ...    each into the result file of the same name

A row about the same cell replaces the old one, as it would have on the machine that measured it. Several files of one name,
from processes that ran beside each other, are taken in the order given.
"""

import json
import sys
from pathlib import Path

from accuracy_rows import RESULTS, merge


def main() -> None:
    """Merge every file named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        report = json.loads(path.read_text())
        for row in report["rows"]:
            merge(RESULTS / path.name, report["runs"][row["run"]], row)
        print(f"{path}: {len(report['rows'])} rows")


if __name__ == "__main__":
    main()
