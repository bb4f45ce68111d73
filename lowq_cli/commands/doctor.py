"""lowq doctor: what this machine has, what works on it, and what to install where something is missing."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from lowq_cli import console
from lowq_cli.commands import AsJson

if TYPE_CHECKING:
    from lowq_cli.checkup import Check

EXAMPLES = """Examples:
  lowq doctor
  lowq doctor --json"""
MANY = 3  # min. number of kernels, unsupported here for the same reason, that are shown as one row


def doctor(as_json: AsJson = False) -> None:
    """Check torch, GPU and kernel libraries: runs every kernel on a small product."""
    with console.status("trying every kernel; the first run compiles them, which takes up to a minute"):
        from lowq_cli.checkup import checkup

        checks = checkup()
    ok = all(c.ok is not False for c in checks)
    if as_json:
        rows: list[dict[str, Any]] = [{"name": c.name, "ok": c.ok, "found": c.result, "fix": c.fix} for c in checks]
        console.out_json({"ok": ok, "checks": rows})
    else:
        console.table("", ("", "check", "found"), table_rows(checks), on_stdout=True)
        for c in checks:
            if c.fix:
                console.out(f"{c.name}: {c.fix}")
    if not ok:
        raise typer.Exit(1)
    console.say("next: lowq run demo 'Once upon a time', or lowq quantize MODEL")


def table_rows(checks: "list[Check]") -> list[tuple[str, str, str]]:
    """The rows of the table, one per check; kernels that are missing for the same reason share one row at the end."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    reasons = Counter(c.result for c in checks if c.ok is None)
    rows = [(marks[c.ok], c.name, c.result) for c in checks if c.ok is not None or reasons[c.result] < MANY]
    return rows + [("-", f"{n} kernels", reason) for reason, n in reasons.items() if n >= MANY]
