"""A long run: bends and kills by turns until time or numbers are spent; what it found, and its table."""

import json
import os
import platform
import shutil
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
from bend import bend
from judge import judge
from kills import Command, calls_of, commands, files, side_by_side, source_changed, tried
from valid import Valid, all_valid

from lowq_cli.run.pipeline import quantize

FOUND = Path(__file__).with_name("found.json")  # bends that failed once: [seed, format]
KILL_SHARE = 0.5  # of the time
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 80


class Ground:
    """Valid files of every format in a folder, and the commands that write."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = str(folder / "cache"), str(folder / "state")
        (folder / "valid").mkdir(parents=True)
        self.folder, self.bent, self.out = folder, folder / "bent", folder / "kills"
        self.valid: list[Valid] = all_valid(folder / "valid")
        self.paths = {v.format: v.model for v in self.valid} | {"packed": folder / "packed"}
        quantize(self.paths["dense"], self.paths["packed"], bits=4, group=32, method="rtn", zero="none", lm_head="keep")
        (folder / "text.txt").write_text(TEXT)
        self.commands: list[Command] = []
        self.wanted: dict[str, tuple[dict[str, bytes], int]] = {}

    def bends(self, seed: int, only: str | None = None) -> tuple[str, dict[str, Any], Any]:
        """The bend of one seed: format, what was bent, verdict."""
        rng = Random(seed)
        valid = rng.choice(self.valid)
        if only is not None:
            valid = next(v for v in self.valid if v.format == only)
        what = bend(valid.model, self.bent, rng)
        model = self.bent if valid.model.is_dir() else self.bent / valid.model.name
        return valid.format, what, judge(valid, model, what)

    def prepare_kills(self) -> None:
        """Each command undisturbed: its files, and how many calls it makes."""
        self.commands = commands(self.paths, self.folder / "text.txt")
        for command in self.commands:
            for count in (False, True):
                shutil.rmtree(self.out, ignore_errors=True)
                self.out.mkdir()
                os.environ["XDG_STATE_HOME"] = str(self.out / "state")
                calls = calls_of(command, self.out) if count else 0
                command.run(self.out)
                self.wanted[command.name] = files(self.out), calls

    def kills(self, seed: int) -> tuple[str, str, str]:
        """One stopped run: command, how it was stopped, what was wrong then or ""."""
        rng = Random(seed)
        command = rng.choice(self.commands)
        how = rng.choice(("kill", "kill", "kill", "kill", "kill", "int", "term", "hup", "two", "source"))
        wanted, calls = self.wanted[command.name]
        if how == "source":
            return "quantize", how, source_changed(self.paths, self.out, rng)
        if how == "two":
            return command.name, how, side_by_side(command, self.out, wanted)
        return command.name, how, tried(command, self.out, wanted, calls, rng, how)


def run(seconds: float, bends: int, kills: int, seed: int | None, out: Path) -> int:
    """Bend and kill for so long; write the table; 1 if anything was found."""
    first = int(time.time()) * 1_000_000 if seed is None else seed
    began, faults = time.monotonic(), []
    bent: dict[str, dict[str, Any]] = defaultdict(lambda: {"bent": 0, "accepted": 0, "faults": 0, "slowest_s": 0.0})
    killed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    with tempfile.TemporaryDirectory(prefix="lowq-fuzz-") as folder:
        ground = Ground(Path(folder) / "ground")
        if kills:
            ground.prepare_kills()
        done = [0, 0]
        spent = [0.0, 0.0]
        told = time.monotonic()
        while time.monotonic() - began < seconds and (done[0] < bends or done[1] < kills):
            killing = done[1] < kills and (spent[1] <= KILL_SHARE * sum(spent) or done[0] >= bends)
            start = time.monotonic()
            if killing:
                name, how, said = ground.kills(first + done[1])
                killed[name][how] += 1
                if said:
                    killed[name]["faults"] += 1
                    faults.append({"kill": first + done[1], "fault": said})
            else:
                name, what, verdict = ground.bends(first + done[0])
                row = bent[name]
                row["bent"] += 1
                row["accepted"] += verdict.accepted
                row["slowest_s"] = max(row["slowest_s"], round(verdict.seconds, 2))
                if verdict.fault:
                    row["faults"] += 1
                    faults.append({"bend": first + done[0], "format": name, "what": what, "fault": verdict.fault})
            done[killing] += 1
            spent[killing] += time.monotonic() - start
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{done[0]} bends, {done[1]} kills, {len(faults)} faults", flush=True)
                _write(out, began, first, bent, killed, faults)
    _write(out, began, first, bent, killed, faults)
    for fault in faults[:20]:
        print(json.dumps(fault))
    print(f"{done[0]} bends, {done[1]} kills, {len(faults)} faults: {out}")
    if new := [[f["bend"], f["format"]] for f in faults if "bend" in f]:
        kept = json.loads(FOUND.read_text()) if FOUND.is_file() else []
        FOUND.write_text(json.dumps(kept + [row for row in new[:50] if row not in kept]) + "\n")
    return int(bool(faults))


def _write(out: Path, began: float, first: int, bent: Any, killed: Any, faults: list[dict[str, Any]]) -> None:
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}, one process",
        "versions": {name: version(name) for name in ("lowq", "torch", "transformers", "safetensors")},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": first,
        "bends": {k: dict(v) for k, v in sorted(bent.items())},
        "kills": {k: dict(v) for k, v in sorted(killed.items())},
        "faults": faults[:20],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
