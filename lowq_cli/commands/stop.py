"""lowq stop: end the servers that --keep-alive started."""

from typing import Annotated

import typer

from lowq_cli import console
from lowq_packers.errors import NotFoundError

EXAMPLES = """Examples:
  lowq stop
  lowq stop demo
  lowq stop --all   (those of lowq serve too)"""


def stop(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Only those with these models.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Those that `lowq serve` started too.")] = False,
) -> None:
    """End the servers that --keep-alive left behind; what they are writing ends first."""
    from lowq_cli import running

    found = [s for s in running.all_info() if s["kept"] or every]
    if models:
        found = [s for s in found if {m["name"] for m in s["models"] if m["state"] != "absent"} & set(models)]
        if not found:
            raise NotFoundError(f"no server that was left behind has {' or '.join(models)}; lowq ps lists all")
    for server in found:
        running.stop(server["process"])
        console.say(f"stopped process {server['process']} ({', '.join(m['name'] for m in server['models'])})")
    if not found:
        console.say("none was left behind; lowq ps lists all that run, lowq stop --all ends those of lowq serve too")
