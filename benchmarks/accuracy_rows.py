"""Part of accuracy.py: its texts, flags, and result files, in which a new measurement replaces the old one."""

import argparse
import datetime
import fcntl
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowq_cli.evaluate import perplexity

RESULTS = Path(__file__).parent / "results" / "accuracy"
TEXTS = {"wikitext2_test": 131072, "mix_valid_sample": None}  # file -> tokens read
Row = dict[str, Any]


def words(text: str) -> list[str]:
    """A flag's value with commas between."""
    return text.split(",")


def ints(text: str) -> list[int]:
    """The same, numbers."""
    return [int(x) for x in text.split(",")]


def parser(out: str, bits: tuple[int, ...], packages: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """The flags of every experiment. `packages`: further packages whose versions are recorded."""
    made = argparse.ArgumentParser()
    made.add_argument("--models", type=Path, required=True)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--only", help="one model's folder name")
    made.add_argument("--bits", type=ints, default=list(bits))
    made.add_argument("--group", type=ints, default=[32, 64, 128])
    made.add_argument("--tokens", type=int, help="read fewer tokens of each text")
    made.add_argument("--out", type=Path, default=RESULTS / out)
    made.add_argument("--missing", action="store_true", help="only cells that the file lacks")
    made.add_argument("--shard", type=ints, default=[0, 1], help="I,N: of the cells every Nth from the Ith on")
    made.set_defaults(packages=("lowq", "torch", "transformers", *packages))
    return made


def device() -> str:
    """ "cuda" where there is one; products are then in full fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return "cuda" if torch.cuda.is_available() else "cpu"


class Judge:
    """A model in fp32 whose weights are replaced, and its perplexity on the texts."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.to(device())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = {name: perplexity.tokenize(self.tokenizer, (args.data / f"{name}.txt").read_text()) for name in TEXTS}
        self.texts = {name: t[: args.tokens or TEXTS[name]] for name, t in ids.items()}

    def ppl(self) -> dict[str, float]:
        """Text -> perplexity of the weights as they are now."""
        return {name: round(perplexity.evaluate(self.model, ids).ppl, 4) for name, ids in self.texts.items()}


class Results:
    """A result file. Several processes may add rows to it at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path = args.out
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run = {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if device() == "cuda" else "CPU",
            "versions": {p: importlib.metadata.version(p) for p in args.packages},
            "window": perplexity.WINDOW,
            "tokens": args.tokens or TEXTS,
        }

    def take(self, rows: Iterator[Row]) -> None:
        """Add each row as it comes, and print it."""
        for row in rows:
            print(json.dumps(row), flush=True)
            merge(self.path, self.run, row)


def run(args: argparse.Namespace, cells: Callable[..., Iterator[Row]], measure: Callable[..., Iterator[Row]]) -> None:
    """Measure every model's cells (a row's part that says what it is about); rows go into the result file as they come."""
    results = Results(args)
    first, step = args.shard
    for folder in sorted(f.parent for f in args.models.glob("*/config.json") if args.only in (None, f.parent.name)):
        wanted = list(cells(folder.name, args))
        wanted = (missing(wanted, args.out) if args.missing else wanted)[first::step]
        if wanted:
            results.take(measure(folder, Judge(folder, args), wanted, args))


def missing(cells: Iterable[Row], path: Path) -> list[Row]:
    """The cells that a result file has no row for."""
    known = {key(r) for r in json.loads(path.read_text())["rows"]} if path.is_file() else set()
    return [c for c in cells if key(c) not in known]


def merge(path: Path, run: Row, row: Row) -> None:
    """Put one row into a result file, in place of an older one about the same. `run`: what all rows of its run share."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the folder itself: a lock file would have to be removed under others' hands
        report = json.loads(path.read_text()) if path.is_file() else {"runs": [], "rows": []}
        if run not in report["runs"]:
            report["runs"].append(run)
        kept = [r for r in report["rows"] if key(r) != key(row)]
        report["rows"] = sorted([*kept, row | {"run": report["runs"].index(run)}], key=key)
        path.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        os.close(folder)


def key(row: Row) -> tuple[Any, ...]:
    """What a row is about, in the order of the file."""
    texts = (row.get(name, "") for name in ("measure", "stored", "method", "calib", "part"))
    about = (row["model"], -row.get("bits", 99), row.get("group", 0), row.get("target", 0))
    return (*about, *texts, row.get("calib_tokens", 0))
