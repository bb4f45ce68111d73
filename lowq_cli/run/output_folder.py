"""The output folder of a run: written by one process at a time, resumable after a kill, never mistaken for complete.

    lowq-journal.jsonl          what the run is, then one line per finished item: {"item", "rel_error", "crc": [per tensor]}
    model-....safetensors.partial   has its full size from the start; each tensor is written at its final position
    model-....safetensors       gets this name once all its items are on disk
    lowq-calibrated-<run>/      of a calibrated method, removed at the end: layer-NNNNN.safetensors, a
        finished layer; of distill also end-to-end.safetensors (after each pass of all layers), and after the last pass
        around.safetensors (embedding, head and the norm between) and polished-layer-NNNNN.safetensors
    config.json                 written last; without it no loader accepts the folder as a model

A rerun checks the bytes of every journalled item in a partial file against its checksum and continues after them, so even
a line that reached the disk before its data does no harm. The journal is removed once config.json is written.
"""

import json
import os
import shutil
import stat
import time
import zlib
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from lowq_cli import quantizers
from lowq_cli.files.folder import held, staged
from lowq_cli.files.safetensors_io import read_bytes, read_header, read_json
from lowq_cli.files.source import CONFIG, JOURNAL, LOG, PARTIAL, REPORT
from lowq_cli.files.weight_files import INDEX
from lowq_cli.plan.plan import Item, Plan, Shard
from lowq_cli.state import writing
from lowq_packers.atomic import replacing, reserve, write_at
from lowq_packers.errors import LowqError, UsageError
from lowq_packers.regular import read_regular

CHUNK = 1 << 24
UNREAD = 8  # hex digits of a run's hash that do not depend on its calibration text

Record = dict[str, Any]


class OutputFolder:
    """An output folder, locked for this process while the `with` block runs.

    Args:
        path: the folder; created if missing.
        run: the hash that names the run; another run's folder is refused.
        files: names of all files that the run will write; `fresh` removes only these.
        fresh: first remove what lowq wrote here in an earlier run.
    Raises:
        UsageError: not writable, in use by another process, holding another run or files that lowq did not write.
    """

    def __init__(self, path: Path, run: str, files: list[str], fresh: bool = False) -> None:
        self.path, self.run, self.fresh = path, run, fresh
        self.files = sorted({*files, CONFIG, REPORT})
        self.finished: dict[str, Record] = {}  # item -> its journal record
        self.already_done = False
        self._journal = self._lock = -1
        self._stack = ExitStack()

    def __enter__(self) -> "OutputFolder":
        with writing(self.path), self._stack:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._stack.enter_context(held(self.path))
            self._open()
            self._stack = self._stack.pop_all()  # keep the lock and the journal open
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1
        self._stack.close()

    def _open(self) -> None:
        """Check the contents of the folder, and start or continue the journal."""
        header, records = read_journal(self.path / JOURNAL)
        report = _read_report(self.path / REPORT)
        ours = bool(header or report)
        if not ours:
            _check_files(self.path)
        if self.fresh:
            _remove_files(self.path, {*header.get("files", ()), *report.get("files", ())})
        elif report.get("run") == self.run and (self.path / CONFIG).is_file():
            self.already_done = True
            for name in (JOURNAL, *(n + PARTIAL for n in (JOURNAL, CONFIG))):
                (self.path / name).unlink(missing_ok=True)
            _remove_staged(self.path)
            return
        elif header.get("run") == self.run:
            self.finished = {r["item"]: r for r in records}
        elif ours:
            raise _another_run(self.path)
        self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        """Rewrite the journal with its valid records, without a truncated last line."""
        lines = [{"run": self.run, "files": self.files}, *self.finished.values()]
        self.replace(JOURNAL, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = os.open(self.path / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)

    def forget(self, items: list[Item]) -> None:
        """Remove the records of these items."""
        if [i for i in items if self.finished.pop(i.name, None)]:
            self._rewrite_journal()

    def record(self, item: Item, rel_error: float | None, crc: list[int]) -> None:
        """Append the record of an item whose tensors are written."""
        line = {"item": item.name, "rel_error": rel_error, "crc": crc}
        with writing(self.path / JOURNAL):
            raw = (json.dumps(line) + "\n").encode()
            while raw:  # a full disk may take only part of a line
                raw = raw[os.write(self._journal, raw) :]
        self.finished[item.name] = line

    def replace(self, name: str, content: bytes) -> None:
        """Write a complete file, flush it to disk, then rename it into place."""
        with writing(self.path / name), replacing(self.path / name, self.path / (name + PARTIAL), sync=True) as partial:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            try:
                write_at(fd, content, 0)
            finally:
                os.close(fd)

    def finish(self, config: bytes) -> None:
        """Write config.json, the last file, and remove the journal."""
        os.fsync(self._lock)
        self.replace(CONFIG, config)
        os.fsync(self._lock)
        (self.path / JOURNAL).unlink(missing_ok=True)

    def log(self, message: str) -> None:
        """Append a line with the time to lowq.log."""
        with writing(self.path / LOG):
            fd = os.open(self.path / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            with open(fd, "a", encoding="utf-8", errors="backslashreplace") as f:
                f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")


class ShardFile:
    """One output file while it is written. `verified` are its intact items from an earlier run."""

    def __init__(self, folder: OutputFolder, shard: Shard) -> None:
        self.folder, self.shard = folder, shard
        self.final = folder.path / shard.name
        self.partial = folder.path / (shard.name + PARTIAL)
        self._fd = -1
        self.complete = self.is_whole(folder, shard)
        if not self.complete:
            try:
                with writing(self.partial):
                    self.final.unlink(missing_ok=True)
                    self._open()
            except BaseException:
                self.close()
                raise

    @staticmethod
    def is_whole(folder: OutputFolder, shard: Shard) -> bool:
        """Whether the final file exists with the expected header and size, and all its items are recorded."""
        try:
            header = read_header(folder.path / shard.name)
        except LowqError:
            return False
        recorded = all(i.name in folder.finished for i in shard.items)
        return header.size == shard.size and header.crc == zlib.crc32(shard.header) and recorded

    def _open(self) -> None:
        """Open or create the partial file, and remove the records of items whose bytes do not match their checksums."""
        if not is_plain(self.partial):
            self.partial.unlink(missing_ok=True)
        resumed = self.partial.exists() and self.partial.stat().st_size == self.shard.size
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if not resumed:
            self.folder.forget(list(self.shard.items))
            os.ftruncate(self._fd, 0)
            reserve(self._fd, self.shard.size)
        write_at(self._fd, self.shard.header, 0)
        self.folder.forget([i for i in self.shard.items if i.name in self.folder.finished and not self._intact(i)])

    def _intact(self, item: Item) -> bool:
        crcs = []
        for name, header in item.outputs:
            at, crc = self.shard.placed[name].offset, 0
            for start in range(0, header.nbytes, CHUNK):
                crc = zlib.crc32(read_bytes(self._fd, at + start, min(CHUNK, header.nbytes - start), str(self.partial)), crc)
            crcs.append(crc)
        return crcs == self.folder.finished[item.name]["crc"]

    def write(self, tensor: str, offset: int, content: memoryview | bytes | bytearray) -> None:
        """Write bytes at `offset` of a tensor."""
        with writing(self.partial):
            write_at(self._fd, content, self.shard.placed[tensor].offset + offset)

    def finish(self) -> None:
        """Flush to disk and rename into place."""
        with writing(self.partial):
            os.fsync(self._fd)
            self.close()
            os.replace(self.partial, self.final)

    def close(self) -> None:
        """Close the file; its contents stay for a rerun."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_plain(path: Path) -> bool:
    """Whether the path is a regular file of this user and not a link: only such files are written into."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def read_journal(path: Path) -> tuple[Record, list[Record]]:
    """Header and records of a journal, up to the first truncated or unknown line; ({}, []) without a journal."""
    lines = []
    try:
        raw = read_regular(path)
    except LowqError:
        return {}, []
    for line in raw.split(b"\n")[:-1]:  # text after the last newline is a truncated line
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    if not lines or not isinstance(lines[0], dict) or not isinstance(lines[0].get("run"), str) or not _names(lines[0]):
        return {}, []
    wellformed = [
        r for r in lines[1:] if isinstance(r, dict) and isinstance(r.get("item"), str) and {"rel_error", "crc"} <= r.keys()
    ]
    return lines[0], wellformed


def params_written(folder: Path, plan: Plan) -> int:
    """How many of the plan's weights another process, which is writing the folder, has finished: written, or calibrated."""
    finished = {record["item"] for record in read_journal(folder / JOURNAL)[1]}
    last = "polished-layer" if any(i.method and quantizers.needs_distilling(i.method) for i in plan.items) else "layer"
    for path in (path for layers in staged(folder) for path in layers.glob(f"{last}-*.safetensors")):
        with suppress(LowqError):  # the other process has removed it meanwhile
            finished |= _calibrated(path)
    return sum(item.params for item in plan.items if item.name in finished)


@cache
def _calibrated(path: Path) -> frozenset[str]:
    """The items in the file of a calibrated layer."""
    return frozenset(name.rpartition(".")[0] for name in read_header(path).tensors)


def _read_report(path: Path) -> Record:
    try:
        report = read_json(path)
    except LowqError:
        return {}
    return report if isinstance(report.get("run"), str) and _names(report) else {}


def check_run(folder: Path, run: str) -> None:
    """Raise UsageError, before the calibration text is written, if `folder` holds files of others or of another run.

    run: the hash of the run without its text.
    """
    if before := run_in(folder):
        if before[:UNREAD] != run[:UNREAD]:
            raise _another_run(folder)
    elif folder.is_dir():
        _check_files(folder)


def _another_run(folder: Path) -> UsageError:
    return UsageError(f"{folder} holds another lowq run; use --fresh or another --out (in Python: fresh=True or out=)")


def _check_files(folder: Path) -> None:
    """Raise UsageError if a folder without a run of lowq holds files, except those of a run killed right after its start."""
    early = (LOG, JOURNAL, JOURNAL + PARTIAL)
    if foreign := sorted(p.name for p in folder.iterdir() if p.name not in early or not is_plain(p)):
        raise UsageError(f"{folder} holds files that lowq did not write, such as {foreign[0]}; use another --out")


def run_in(folder: Path) -> str:
    """The hash of the run that wrote or is writing a folder, from its report or journal; "" if neither is lowq's."""
    return str(_read_report(folder / REPORT).get("run") or read_journal(folder / JOURNAL)[0].get("run") or "")


def remove(folder: Path) -> list[str]:
    """Delete what lowq wrote into a folder, and the folder if it is then empty. Returns the names of remaining files.

    Raises BusyError if another process is writing it, OSError.
    """
    with held(folder):
        report, (header, _) = _read_report(folder / REPORT), read_journal(folder / JOURNAL)
        _remove_files(folder, {*header.get("files", ()), *report.get("files", ())})
        if left := sorted(p.name for p in folder.iterdir()):
            return left
        folder.rmdir()
        return []


def _remove_files(folder: Path, names: set[str]) -> None:
    """Delete lowq's files; config.json first, so that the remaining files never look like a complete checkpoint."""
    reports = {p.name for p in folder.glob("lowq_*.json")}  # the report, and files of other commands
    for name in (CONFIG, *sorted({*names, *reports} - {CONFIG}), JOURNAL, LOG):
        for leaf in (name, name + PARTIAL):
            if Path(leaf).name == leaf and not (folder / leaf).is_dir():  # a tampered list must not delete files outside
                (folder / leaf).unlink(missing_ok=True)
    _remove_staged(folder)


def _remove_staged(folder: Path) -> None:
    """Delete the finished layers that a calibration stored."""
    for layers in staged(folder):
        shutil.rmtree(layers)


def _names(table: Record) -> bool:
    files = table.get("files", [])
    return isinstance(files, list) and all(isinstance(name, str) for name in files)


def output_names(plan: Plan, companions: list[str]) -> list[str]:
    """Names of all files of a finished run except the report, config and log."""
    index = [INDEX] if len(plan.shards) > 1 else []
    return [*(s.name for s in plan.shards), *index, *companions]
