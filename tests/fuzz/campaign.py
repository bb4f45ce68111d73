"""A long run of altered files and killed commands in turn, until its time or number is reached; its findings and table."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
from bend import bend
from companions import COMPANIONS, Companions
from judge import judge
from kills import SLOW, Command, begin, calls_of, commands, differences, files, side_by_side, source_changed, tried
from valid import SIZES, Valid, all_valid, dense, second_of_each
from valid_tables import all_tables

from lowq_cli.interop.exporter import export
from lowq_cli.run.pipeline import quantize
from lowq_kernels.products.cpu import native
from lowq_packers.atomic import write_whole

FOUND = Path(__file__).with_name("found.json")  # bends that failed once: [seed, format, whether the second file of it]
KILL_SHARE = 0.5  # of the time
COMPANION_SHARE = 20  # one of so many bends alters a file next to weights: a command takes 20 times as long as a read
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12


class Ground:
    """Valid files of every format in a folder, and the commands that write; of those that take seconds only with `slow`."""

    def __init__(self, folder: Path, slow: bool = True) -> None:
        self.slow = slow
        torch.set_num_threads(1)
        os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = str(folder / "cache"), str(folder / "state")
        (folder / "valid").mkdir(parents=True)
        self.folder, self.bent, self.out = folder, folder / "bent", folder / "kills"
        self.valid: list[Valid] = all_valid(folder / "valid")
        tables, second_tables = all_tables(folder / "tables")
        self.second = second_of_each(folder / "second") | second_tables
        self.paths = {v.format: v.model for v in self.valid} | {"packed": folder / "packed"}
        quantize(self.paths["dense"], self.paths["packed"], bits=4, group=32, method="rtn", zero="none", lm_head="keep")
        export(self.paths["packed"], "compressed-tensors", folder / "theirs")
        self.paths["theirs"] = folder / "theirs"
        self.valid += tables
        (folder / "text.txt").write_text(TEXT)
        self.paths["speaking"] = shutil.copytree(self.paths["dense"], folder / "speaking")
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "!"}
        (self.paths["speaking"] / "tokenizer_config.json").write_text(json.dumps(facts))
        self.paths["deep"] = dense(folder / "deep", SIZES | {"num_hidden_layers": 3})  # a draft head reads three layers
        self.beside: Companions | None = None
        self.commands: list[Command] = []
        self.wanted: dict[str, tuple[dict[str, bytes], int]] = {}

    def bends(self, seed: int, only: str | None = None, second: bool | None = None) -> tuple[str, dict[str, Any], Any]:
        """The bend of one seed: format, what was bent, verdict. second: of the other file of a format; half of them are.

        only: the format, or the name of a file next to weights, as which `companions` reports.
        """
        if only in COMPANIONS:
            return self.companions(seed)
        rng = Random(seed)
        rng.choice(range(10))  # once the format, of ten: the bends of found.json come behind it
        name = only or Random(f"format {seed}").choice(self.valid).format
        valid = next(v for v in self.valid if v.format == name)
        if Random(-seed).random() < 0.5 if second is None else second:
            valid = self.second[valid.format]
        what, model = self.bend(valid, rng)
        return valid.format, what, judge(valid, model)

    def companions(self, seed: int) -> tuple[str, dict[str, Any], Any]:
        """The alteration of a file next to weights by one seed: its name, how, and the verdict on a command that reads it."""
        self.beside = self.beside or Companions(self.folder / "companions")
        return self.beside.bend(seed)

    def bend(self, valid: Valid, rng: Random) -> tuple[dict[str, Any], Path]:
        """The alteration of a copy of a valid file, and the copy."""
        out = self.bent / f"{valid.format}-{valid is self.second[valid.format]}"
        out.parent.mkdir(exist_ok=True)
        what = bend(valid.model, out, rng)
        return what, out if valid.model.is_dir() else out / valid.model.name

    def prepared(self, command: Command) -> tuple[dict[str, bytes], int]:
        """The files that an undisturbed command leaves, and the number of its system calls."""
        if command.name not in self.wanted:
            for count in (False, True):
                begin(command, self.out)
                calls = calls_of(command, self.out) if count else 0
                command.run(self.out)
                result = files(self.out), calls
                assert not (count and differences(self.wanted[command.name][0], result[0], command.name)), (
                    "other bytes each time"
                )
                self.wanted[command.name] = result
        return self.wanted[command.name]

    def all_commands(self) -> list[Command]:
        """Those that are stopped."""
        if not self.commands:
            made = commands(self.paths, self.folder / "text.txt")
            self.commands = [c for c in made if self.slow or c.name not in SLOW]
        return self.commands

    def kills(self, seed: int) -> tuple[str, str, str]:
        """One stopped run: the command, the signal, and the fault found or ""."""
        rng, every = Random(seed), self.all_commands()
        (command,) = rng.choices(every, [1 if c.name in SLOW else 4 for c in every])
        how = rng.choice(("kill", "kill", "kill", "kill", "kill", "int", "term", "hup", "two", "source"))
        if how == "source":
            name, output = source_changed(self.paths, self.folder / "text.txt", self.out, rng)
            return f"{name}, its source changed", how, output
        expected, calls = self.prepared(command)
        if how == "two":
            return command.name, how, side_by_side(command, self.out, expected)
        at = [rng.randrange(calls) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        return command.name, how, tried(command, self.out, expected, at, how)


def run(seconds: float, bends: int, kills: int, seed: int | None, out: Path, jobs: int, add: bool) -> int:
    """Bend and kill for so long in `jobs` processes; write the table, with `add` on top of the one there; 1 if any fault."""
    first = int(time.time()) * 1_000_000 if seed is None else seed
    before = [json.loads(out.read_text())] if add and out.is_file() else []
    if jobs == 1 and not before:
        return alone(seconds, bends, kills, first, out)
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{i}.json" for i in range(jobs)]
        share = ["--minutes", str(seconds / 60), "--bends", str(-(-bends // jobs)), "--kills", str(-(-kills // jobs))]
        line = [sys.executable, "-m", "tests.fuzz", *share]
        at = Path(__file__).parents[2]
        running = [
            subprocess.Popen(
                [*line, "--seed", str(first + i * 1_000_000), "--out", str(part)], cwd=at, stdout=subprocess.DEVNULL
            )
            for i, part in enumerate(parts)
        ]
        while running:
            try:
                running[0].wait(60)
                running.pop(0)
            except subprocess.TimeoutExpired:
                pass
            if result := before + [json.loads(p.read_text()) for p in parts if p.is_file()]:
                write_whole(out, (json.dumps(added(result), indent=1) + "\n").encode())
                print(_told(added(result)), flush=True)
        if len(result) < len(before) + jobs:
            print("some processes ended without a result")
            return 1
    keep(added(result)["faults"])
    return int(bool(added(result)["faults"]))


def added(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of several runs together: sums of counts, the slowest of each format, all minutes of processors."""
    sums: dict[str, Any] = parts[-1] | {"minutes": round(sum(p["minutes"] for p in parts), 1), "seed": parts[0]["seed"]}
    for kind in ("bends", "kills"):
        sums[kind] = {name: {} for name in sorted({n for p in parts for n in p[kind]})}
        for name, row in sums[kind].items():
            for field in dict.fromkeys(f for p in parts for f in p[kind].get(name, {})):
                of = [p[kind][name].get(field, 0) for p in parts if name in p[kind]]
                row[field] = max(of) if field == "slowest_s" else sum(of)
    return sums | {"faults": [f for p in parts for f in p["faults"]][:20]}


def _told(result: dict[str, Any]) -> str:
    bent = sum(row["bent"] for row in result["bends"].values())
    killed = sum(n for row in result["kills"].values() for how, n in row.items() if how != "faults")
    return f"{bent} bends, {killed} kills, {len(result['faults'])} faults"


def keep(faults: list[dict[str, Any]]) -> None:
    """Note the bends that failed, for the tests to run again."""
    kept = json.loads(FOUND.read_text()) if FOUND.is_file() else []
    new = [[f["bend"], f["format"], Random(-f["bend"]).random() < 0.5] for f in faults if "bend" in f]
    if new := [row for row in new[:50] if row not in kept]:
        FOUND.write_text(json.dumps(kept + new) + "\n")


def alone(seconds: float, bends: int, kills: int, first: int, out: Path) -> int:
    """`run` in this process."""
    began, faults = time.monotonic(), []
    bent: dict[str, dict[str, Any]] = defaultdict(lambda: {"bent": 0, "accepted": 0, "faults": 0, "slowest_s": 0.0})
    killed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    memory = Path("/dev/shm")  # where deleting a file takes no time: half of all otherwise
    with tempfile.TemporaryDirectory(prefix="lowq-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        if kills or bends >= COMPANION_SHARE:
            native.library()  # compiled once for this user, not into the caches of Ground, where a command would leave it
        ground = Ground(Path(folder) / "ground", slow=kills > 0)
        done = [0, 0]
        spent = [0.0, 0.0]
        message = time.monotonic()
        while time.monotonic() - began < seconds and (done[0] < bends or done[1] < kills):
            killing = done[1] < kills and (spent[1] <= KILL_SHARE * sum(spent) or done[0] >= bends)
            start = time.monotonic()
            if killing:
                name, how, output = ground.kills(first + done[1])
                killed[name][how] += 1
                if output:
                    killed[name]["faults"] += 1
                    faults.append({"kill": first + done[1], "fault": output})
            else:
                altered = ground.companions if done[0] % COMPANION_SHARE == COMPANION_SHARE - 1 else ground.bends
                name, what, verdict = altered(first + done[0])
                row = bent[name]
                row["bent"] += 1
                row["accepted"] += verdict.accepted
                row["slowest_s"] = max(row["slowest_s"], round(verdict.seconds, 2))
                if verdict.fault:
                    row["faults"] += 1
                    faults.append({"bend": first + done[0], "format": name, "what": what, "fault": verdict.fault})
            done[killing] += 1
            spent[killing] += time.monotonic() - start
            if time.monotonic() - message > 60:
                message = time.monotonic()
                print(f"{done[0]} bends, {done[1]} kills, {len(faults)} faults", flush=True)
                _write(out, began, first, bent, killed, faults)
    _write(out, began, first, bent, killed, faults)
    for fault in faults[:20]:
        print(json.dumps(fault))
    print(f"{done[0]} bends, {done[1]} kills, {len(faults)} faults: {out}")
    keep(faults)
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
    write_whole(out, (json.dumps(result, indent=1) + "\n").encode())
