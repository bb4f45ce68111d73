"""The records of a finished run: lowq_report.json, and the result that the command prints."""

import zlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lowq_cli.files.checkpoint import sha256
from lowq_cli.files.front_matter import license_of
from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.source import REPORT, Source
from lowq_cli.memory import peak_rss
from lowq_cli.plan.plan import Plan
from lowq_cli.run.events import Result
from lowq_cli.run.output_folder import OutputFolder, ShardFile
from lowq_packers.errors import DamagedError

WORST = 5


def make_report(
    source: Source,
    plan: Plan,
    output: OutputFolder,
    device: torch.device,
    notes: Mapping[str, str],
    contents: Mapping[str, bytes],
    calibrated: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of lowq_report.json: recipe, files, and each tensor's scheme, error and checksums. It contains no times.

    contents: of config.json, the index and the companion files, for their hashes.
    calibrated: facts about the calibration text.
    """
    name = (
        source.folder.resolve().name if source.folder and source.name != "demo" and Path(source.name).is_dir() else source.name
    )
    tensors = []
    for i in plan.items:
        record = output.finished[i.name]
        line: dict[str, Any] = {
            "name": i.name,
            "kind": i.kind,
            "shape": list(i.shape),
            "bytes": i.nbytes,
            "crc32": record["crc"],
        }
        if i.scheme:
            line |= {"scheme": i.spelled, "rel_error": record["rel_error"]} | ({"method": i.method} if i.method else {})
        if note := "; ".join(filter(None, (i.note, notes.get(i.name)))):
            line["note"] = note
        tensors.append(line)
    return {
        "lowq": version("lowq"),
        "run": output.run,
        "source": name,
        **(license_of(source.folder) if source.folder else {}),
        "device": device.type,
        "recipe": plan.recipe.to_json(),
        **({"calibration": dict(calibrated)} if calibrated else {}),
        "bpw": plan.bpw,
        "quantized_bpw": plan.quantized_bpw,
        "quantized_fraction": plan.coverage,
        "source_bytes": plan.source_bytes,
        "bytes": plan.nbytes,
        "weights": {s.name: {"bytes": s.size, "header_crc32": zlib.crc32(s.header)} for s in plan.shards},
        "files": output.files,
        "sha256": {name: sha256(content) for name, content in sorted(contents.items())},
        "tensors": tensors,
    }


def result_of(
    plan: Plan, output: OutputFolder, report: dict[str, Any], seconds: float, resumed: int, done: bool = False
) -> Result:
    """The result of a run, from its report and its duration."""
    quantized = [t for t in report["tensors"] if "rel_error" in t]
    worst = sorted(quantized, key=lambda t: (-t["rel_error"], t["name"]))[:WORST]
    return Result(
        out=str(output.path),
        bpw=plan.bpw,
        bytes=plan.nbytes,
        source_bytes=plan.source_bytes,
        quantized_fraction=plan.coverage,
        seconds=seconds,
        peak_rss_bytes=peak_rss(),
        quantized_bpw=plan.quantized_bpw,
        already_done=done,
        resumed=resumed,
        worst=tuple((t["name"], t["scheme"], t["rel_error"]) for t in worst),
    )


def known_result(plan: Plan, output: OutputFolder, seconds: float) -> Result:
    """The result of a run that finished earlier. Raises DamagedError if its weight files have changed."""
    report = read_json(output.path / REPORT)
    output.finished = {t["name"]: {} for t in report["tensors"]}
    for shard in plan.shards:
        if not ShardFile.is_whole(output, shard):
            raise DamagedError(f"{output.path / shard.name} is missing or not what lowq wrote; run again with --fresh")
    return result_of(plan, output, report, seconds, len(plan.items), done=True)
