"""Write the tables of README.md, benchmarks/README.md and docs/*.md from benchmarks/results/, and the help pages.

    python benchmarks/render.py          rewrite what has changed
    python benchmarks/render.py --check  exit 1 if anything would change, or a result is of no use (a test runs this)

A generated part stands between `<!-- lowq:NAME -->` and `<!-- /lowq:NAME -->`; NAME is a function under `@part`, in pages/ or
here. docs/gemv.md and docs/splitk.md are written whole. Runs anywhere, without a GPU. The pictures: plots.py.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also under `python -P`, which the test uses
import pages
from pages import PARTS, RESULTS, ROOT, gemv, part, splitk, table

for module in pkgutil.iter_modules(pages.__path__):
    importlib.import_module(f"pages.{module.name}")
WHOLE = {"gemv.md": gemv.page, "splitk.md": splitk.page}
MARK = re.compile(r"(<!-- lowq:(\w+) -->\n).*?(<!-- /lowq:\2 -->)", re.DOTALL)


@part
def cli_help() -> str:
    """Every command's --help, as the terminal shows it."""
    from lowq_cli import main

    os.environ |= {"COLUMNS": "110", "TERMINAL_WIDTH": "110"}
    parts = []
    for command in main.app.registered_commands:
        with contextlib.redirect_stdout(io.StringIO()) as page:
            assert main.main([str(command.name), "--help"]) == 0
        parts.append(f"## lowq {command.name}\n\n```text\n{page.getvalue().strip()}\n```\n")
    return "\n".join(parts)


@part
def kernels() -> str:
    """The kernels that can be imported here."""
    from lowq_kernels.dispatch import registry

    return listed(registry.kernels().values())


def listed(specs: Iterable[Any]) -> str:
    """A table of kernels of products."""
    rows = []
    for spec in sorted(specs, key=lambda s: (s.devices, s.rank, s.name)):
        first = (sys.modules[spec.launch.__module__].__doc__ or "").strip().splitlines()[0]
        widths = "/".join(map(str, spec.bits))
        dtypes = "/".join(str(d).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf") for d in spec.dtypes)
        top = spec.m_range[1]
        m = "any" if top >= 1 << 60 else f"{spec.m_range[0]} .. {top}"
        values = "/".join(["grid"] * ("" in spec.tables) + ["table"] * any(spec.tables))
        place = (f"`{spec.name}`", spec.rank, "/".join(spec.devices), "/".join(spec.layouts))
        rows.append((*place, widths, values, least_groups(spec), dtypes, m, first))
    columns = ("kernel", ">rank", "device", "layout", ">bits", "values", ">least group", "activations", "M", "what it is")
    return table(columns, rows)


def least_groups(spec: Any) -> str:
    """The smallest group that a kernel takes, on Hopper if it needs a GPU; with the widths where that depends on them."""
    widths: dict[int, list[int]] = {}
    for bits in spec.bits:
        least = min(group for group in (16, 32, 64, 128) if _takes(spec, bits, group))
        widths.setdefault(least, []).append(bits)
    if len(widths) == 1:
        return str(*widths)
    return ", ".join(f"{group} ({'/'.join(map(str, bits))})" for group, bits in sorted(widths.items()))


def _takes(spec: Any, bits: int, group: int) -> bool:
    """Whether a kernel takes a large product of so many bits and such groups. On a CPU its layout alone answers: the rest
    depends on this machine's compiler and processor."""
    from lowq_kernels import gpu
    from lowq_kernels.dispatch.registry import Call
    from lowq_packers import layouts
    from lowq_packers.scheme import TABLES, Scheme

    kinds = [*(spec.zeros if "" in spec.tables else ()), *(name for name in spec.tables if bits in TABLES.get(name, ()))]
    for layout in spec.layouts:
        for scheme in (Scheme.of(bits, group, kind) for kind in kinds):
            M, side = min(16, spec.m_range[1]), 4096
            call = Call(M, side, side, scheme, layout, spec.dtypes[0], "cuda", gpu.HOPPER.capability, spec.acts[0])
            held = layout not in layouts.LAYOUTS or layouts.LAYOUTS[layout].why_not(scheme, side, side) is None
            if held and ("cuda" not in spec.devices or spec.why_not(call) is None):
                return True
    return False


@part
def prefer() -> str:
    """A row of measurements that says when a kernel goes first: one with a lower bound and its reason."""
    from lowq_kernels.dispatch import policy

    (file,) = (f for f in policy.files() if f["file"] == "h100.json")
    row = next(r for r in file["prefer"] if "why" in r and any(key.startswith("least_") for key in r))
    return f"```json\n{json.dumps(row)}\n```\n"


@part
def operations() -> str:
    """The kernels of the operations that are no products of packed weights."""
    from lowq_kernels.dispatch import registry

    registry.load_kernels()
    specs = sorted((s for s in registry.KERNELS.values() if s.op != "product"), key=lambda s: (s.op, s.rank))
    firsts = [(sys.modules[s.launch.__module__].__doc__ or "").strip().splitlines()[0] for s in specs]
    rows = [(s.op, f"`{s.name}`", s.rank, "/".join(s.devices), first) for s, first in zip(specs, firsts, strict=True)]
    return table(("operation", "kernel", ">rank", "device", "what it is"), rows)


@part
def papers() -> str:
    """Reproductions of papers' kernels."""
    from papers import PAPERS

    return listed(PAPERS.values())


@part
def tuning() -> str:
    """What `lowq tune` and `lowq generate --explain` printed on an H100, cut to the lines that matter."""
    return "```\n" + (RESULTS / "h100" / "tune_8b.log").read_text() + "```\n"


def rendered(text: str) -> str:
    """`text` with every generated part made anew."""
    return MARK.sub(lambda m: m[1] + "\n" + PARTS[m[2]]() + "\n" + m[3], text)


def unread(opened: set[Path], results: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """Results that no table was made of, and that neither a note, nor a page, nor plots.py names by folder and file."""
    readers = [*(root / "benchmarks" / "notes").glob("*.md"), *(root / "docs").glob("*.md"), root / "benchmarks" / "plots.py"]
    text = "\n".join(page.read_text() for page in readers)
    found = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file() and path not in opened}
    return sorted(name for name in found if name not in text)


def main() -> int:
    """Render every page; with --check the exit status is 1 where one would change, or a result is of no use."""
    stale, opened = [], set[Path]()
    sys.addaudithook(lambda event, given: opened.add(Path(given[0])) if event == "open" and type(given[0]) is str else None)
    for page in [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = page.read_text()
        after = WHOLE[page.name]() if page.name in WHOLE else rendered(before)
        if before != after:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(after)
    if stale:
        print(f"{'stale' if '--check' in sys.argv else 'rewrote'}: {', '.join(stale)}", file=sys.stderr)
    if "--check" not in sys.argv:
        return 0
    if idle := unread(opened):
        print(f"nothing reads or names: {', '.join(idle)}", file=sys.stderr)
    return int(bool(stale or idle))


if __name__ == "__main__":
    sys.exit(main())
