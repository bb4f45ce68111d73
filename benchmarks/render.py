"""Write the generated pages, and parts of README.md and docs/*.md: tables from benchmarks/results/, help from the command.

    python benchmarks/render.py          rewrite what has changed
    python benchmarks/render.py --check  exit 1 if anything would change (a test runs this)

A generated part stands between `<!-- lowq:NAME -->` and `<!-- /lowq:NAME -->`; NAME is a function of `PARTS`.
docs/gemv.md and docs/splitk.md are written whole.
No number in a document is typed by hand.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # scripts of this folder import each other by name
import calibrate_page
import cuda_table
import decode_page
import fp8_page
import gemv_page
import interop_page
import mixed_page
import splitk_page
import summary

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WHOLE = {"gemv.md": gemv_page.page, "splitk.md": splitk_page.page}
MARK = re.compile(r"(<!-- lowq:(\w+) -->\n).*?(<!-- /lowq:\2 -->)", re.DOTALL)


def read(name: str) -> Any:
    """A result file below benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a column starting with '>' is right-aligned."""
    lines = ["| " + " | ".join(c.lstrip(">") for c in columns) + " |"]
    lines.append("|" + "|".join("---:" if c.startswith(">") else "---" for c in columns) + "|")
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The verbs with the first line of their help."""
    from lowq_cli import main

    rows = []
    for command in main.app.registered_commands:
        assert command.callback is not None
        rows.append((f"`lowq {command.name}`", (command.callback.__doc__ or "").strip().splitlines()[0]))
    return markdown(("command", "what it does"), rows)


def cli_help() -> str:
    """Every command's --help, as the terminal shows it."""
    from lowq_cli import main

    lowq = Path(sys.executable).with_name("lowq")
    parts = []
    for command in main.app.registered_commands:
        done = subprocess.run(
            [lowq, str(command.name), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "110", "TERMINAL_WIDTH": "110"},
        )
        parts.append(f"## lowq {command.name}\n\n```text\n{done.stdout.strip()}\n```\n")
    return "\n".join(parts)


def kernels(reproductions: bool = False) -> str:
    """The kernels that can be imported here: those that dispatch chooses among, or the reproductions of papers' kernels."""
    from lowq_kernels.dispatch import registry

    rows = []
    listed = [s for s in registry.kernels().values() if s.reproduction == reproductions]
    for spec in sorted(listed, key=lambda s: (s.devices, s.rank, s.name)):
        first = (sys.modules[spec.launch.__module__].__doc__ or "").strip().splitlines()[0]
        widths = "/".join(map(str, spec.bits))
        dtypes = "/".join(str(d).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf") for d in spec.dtypes)
        top = spec.m_range[1]
        m = "any" if top >= 1 << 60 else f"{spec.m_range[0]} .. {top}"
        rows.append((f"`{spec.name}`", "/".join(spec.devices), "/".join(spec.layouts), widths, dtypes, m, first))
    return markdown(("kernel", "device", "layout", ">bits", "activations", "M", "what it is"), rows)


def papers() -> str:
    """Reproductions of papers' kernels."""
    return kernels(reproductions=True)


def measured() -> str:
    """The README's tables."""
    return summary.measured(markdown)


def decode() -> str:
    """Tokens per second of whole models."""
    return decode_page.page(markdown)


def same_tokens() -> str:
    """Tokens of packed models beside those of the dequantized ones."""
    return decode_page.same_tokens(markdown)


def first_token() -> str:
    """Seconds to the first token of a fresh process."""
    return decode_page.first_token(markdown)


def accuracy() -> str:
    """Perplexity of the data-free methods beside the hqq package, one table per model and text."""
    from lowq_cli import quantizers

    report = read("accuracy/data_free.json")
    parts = [_measured(report)]
    rows = [r for r in report["rows"] if "bits" in r]
    methods = list(dict.fromkeys(r["method"] for r in sorted(rows, key=lambda r: (r["method"] != "hqq package", r["method"]))))
    for dense in (r for r in report["rows"] if "bits" not in r):
        for text, ppl in dense["ppl"].items():
            cells = _cells(rows, dense["model"], text)
            lines = []
            for (bits, group), found in cells.items():
                values = [found.get((m, "float32")) for m in methods]
                least = min(v for v in values if v is not None)
                shown = ["" if v is None else f"**{v:,.2f}**" if v == least else f"{v:,.2f}" for v in values]
                default = quantizers.default_method(bits, group)
                stored = found.get((default, "bfloat16"))
                lines.append((f"{bits}-bit g{group}", *shown, default, "" if stored is None else f"{stored:,.2f}"))
            columns = ("", *(f">{m}" for m in methods), "default", ">as stored")
            parts.append(f"### {dense['model']}, {text}: unquantized {ppl:.2f}\n\n{markdown(columns, lines)}")
    return "\n".join(parts)


def calibrated() -> str:
    """What calibration gains: ln(perplexity / unquantized one) of the hqq package, lowq without data, calibrated methods."""
    from lowq_cli import quantizers

    report, free = read("accuracy/calibrated.json"), read("accuracy/data_free.json")
    rows = [r for r in report["rows"] if r["calib"] == "bundled"]
    parts = [_measured(report), f"Calibration text: bundled, at most {max(r['calib_tokens'] for r in rows):,} tokens.\n"]
    pairs = (("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("learn", "gptq"), ("gptq --rotate", "gptq"))
    parts.append("Over all cells (model, width, group size, text) that were measured of both:\n")
    parts.append("\n".join(f"- {calibrate_page.against(rows, *pair)}" for pair in pairs) + "\n")
    parts.append("### Group 64: ln(perplexity / unquantized) as a share of the hqq package's\n")
    parts.append(calibrate_page.goals(free["rows"], rows, markdown))
    methods = sorted({(r["method"], r["stored"]) for r in rows}, key=lambda m: (m[0] != "gptq", m))
    for dense in (r for r in free["rows"] if "bits" not in r):
        for name, floor in dense["ppl"].items():
            others = _cells([r for r in free["rows"] if "bits" in r], dense["model"], name)
            lines = []
            for cell, found in _cells(rows, dense["model"], name).items():
                wanted = [("hqq package", "float32"), (quantizers.default_method(*cell), "bfloat16")]
                ppl = [(others[cell] | found).get(m) for m in [*wanted, *methods]]
                logs = [None if p is None else math.log(p / floor) for p in ppl]
                shown = ["" if p is None else f"{p:,.2f} ({x:.4f})" for p, x in zip(ppl, logs, strict=True)]
                # at 8 bits the differences are chance
                ratios = ["" if x is None or cell[0] == 8 else f"{x / logs[0]:.2f}" for x in logs[1:]]
                lines.append((f"{cell[0]}-bit g{cell[1]}", *shown, *ratios))
            ours = ["without data", *(m for m, _ in methods)]
            columns = ["", ">hqq package", *(f">{m}" for m in ours), *(f">{m} / hqq" for m in ours)]
            if lines:
                parts.append(f"### {dense['model']}, {name}: unquantized {floor:.2f}\n\n{markdown(columns, lines)}")
    other = calibrate_page.other_texts(free["rows"], report["rows"], markdown)
    parts.append(f"### Another calibration text\n\n{other}")
    return "\n".join(parts)


def calibrate_time() -> str:
    """What calibration takes."""
    return calibrate_page.times(markdown)


def mixed() -> str:
    """What --bpw gains over uniform widths."""
    return mixed_page.tables(markdown)


def _measured(report: dict[str, Any]) -> str:
    """Date, device and versions of the runs that a report's rows come from."""
    runs = [report["runs"][i] for i in sorted({r["run"] for r in report["rows"]})]
    told = [f"{r['date']} on {r['device']} ({', '.join(f'{k} {v}' for k, v in r['versions'].items())})" for r in runs]
    return f"Measured {'; '.join(told)}; windows of {runs[0]['window']} tokens.\n"


def _cells(rows: Iterable[dict[str, Any]], model: str, text: str) -> dict[tuple[int, int], dict[tuple[str, str], float]]:
    """(bits, group) -> (method, dtype of its companions) -> perplexity, widest first."""
    cells: dict[tuple[int, int], dict[tuple[str, str], float]] = {}
    for r in sorted((r for r in rows if r["model"] == model), key=lambda r: (-r["bits"], r["group"])):
        cells.setdefault((r["bits"], r["group"]), {})[r["method"], r["stored"]] = r["ppl"][text]
    return cells


def judged() -> str:
    """What other tools make of our exports."""
    return interop_page.judged(markdown)


def two_gpus() -> str:
    """Two GPUs beside one."""
    return interop_page.two_gpus(markdown)


def tuning() -> str:
    """What `lowq tune` and `lowq generate --explain` printed on an H100, cut to the lines that matter."""
    return "```\n" + (RESULTS / "h100" / "tune_8b.log").read_text() + "```\n"


def cuda_tables() -> str:
    """The tile kernels beside the best peer."""
    return cuda_table.text()


def fp8(part: str) -> Callable[[], str]:
    """A table of docs/fp8.md."""
    return lambda: fp8_page.PARTS[part](markdown)


PARTS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        commands,
        cli_help,
        kernels,
        papers,
        measured,
        decode,
        same_tokens,
        first_token,
        accuracy,
        calibrated,
        calibrate_time,
        mixed,
        judged,
        two_gpus,
        tuning,
        cuda_tables,
    )
} | {f"fp8_{part}": fp8(part) for part in fp8_page.PARTS}


def rendered(text: str) -> str:
    """`text` with every generated part made anew."""
    return MARK.sub(lambda m: m[1] + "\n" + PARTS[m[2]]() + "\n" + m[3], text)


def main() -> int:
    """Render every page; the number of pages that changed is the exit status with --check."""
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = page.read_text()
        after = WHOLE[page.name]() if page.name in WHOLE else rendered(before)
        if before != after:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(after)
    if stale:
        print(f"{'stale' if '--check' in sys.argv else 'rewrote'}: {', '.join(stale)}", file=sys.stderr)
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
