"""Measure how close `quantize --max-kl` and `--max-ppl` come to their bound, and in how many rounds. On a GPU or a CPU.

    python benchmarks/once/bounds.py --models MODELS [--out FILE.json]

MODELS holds base and story. Every case is a whole `quantize` of its own; what it measured is then measured again from the
checkpoint by `evaluate`. A case measured again replaces its row.
"""

import argparse
import datetime
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowq_cli.evaluate.perplexity import measure, read_text
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import bound, pipeline
from lowq_cli.run.events import Finished
from lowq_cli.run.prepare import prepare

CASES = [
    ("story", {"max_kl": 0.2}),
    ("story", {"max_kl": 0.05}),
    ("story", {"max_kl": 0.01}),
    ("story", {"max_ppl": 10.0}),
    ("story", {"max_ppl": 2.0}),
    ("story", {"max_kl": 0.02, "fit": 7_000_000}),
    ("base", {"max_kl": 0.3}),
    ("base", {"max_kl": 0.05}),
    ("base", {"max_kl": 0.02}),
    ("base", {"max_ppl": 5.0}),
]


def measured(model: Path, asked: dict[str, Any], out: Path) -> dict[str, object]:
    """One case's row."""
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with prepare(model, make_recipe(**asked), out, device, make=pipeline.maker(str(model), device)) as prepared:
        result = next(e.result for e in pipeline.execute(prepared) if isinstance(e, Finished))
    seconds = time.monotonic() - began
    again = measure(out, read_text(None), model, device, bound.TOKENS)
    found = prepared.bound
    assert found is not None
    return {
        "model": model.name, **asked, "measured": found.measured, "of_limit": found.measured / found.limit,
        "rounds": len(found.trials), "binding": found.binding, "bpw": prepared.mixed and prepared.mixed.bpw,
        "bytes": result.bytes, "again_kl": again.kl, "again_ppl": again.ppl_increase_pct, "one_bit_more": found.more,
        "trials": [vars(t) for t in found.trials], "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Measure what the flags ask for."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--models", type=Path, required=True)
    flags.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "accuracy" / "bounds.json")
    args = flags.parse_args()
    rows: list[dict[str, object]] = []
    for name, asked in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(args.models / name, asked, Path(folder) / "out"))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "trials"}), flush=True)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        versions = {p: version(p) for p in ("lowq", "torch")}
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        args.out.write_text(json.dumps({"date": date, "gpu": gpu, **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
