"""lowq doctor: what this machine has, what works on it, and what to install where something is missing."""

from typing import Annotated, Any

import typer

from lowq_cli import console

EXAMPLES = """Examples:
  lowq doctor
  lowq doctor --json"""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Check torch, GPU and kernel libraries: every kernel on a small product."""
    from lowq_cli.checkup import checkup

    checks = checkup()
    ok = all(c.ok is not False for c in checks)
    if as_json:
        rows: list[dict[str, Any]] = [{"name": c.name, "ok": c.ok, "found": c.found, "fix": c.fix} for c in checks]
        console.out_json({"ok": ok, "checks": rows})
    else:
        marks = {True: "ok", False: "FAIL", None: "-"}
        console.table("", ("", "check", "found"), [(marks[c.ok], c.name, c.found) for c in checks], on_stdout=True)
        for c in checks:
            if c.fix:
                console.out(f"{c.name}: {c.fix}")
    if not ok:
        raise typer.Exit(1)
