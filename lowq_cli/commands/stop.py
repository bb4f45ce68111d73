"""lowq stop: end the servers that --keep-alive started."""

from typing import Annotated

import typer

from lowq_cli import console
from lowq_cli.commands import AsJson
from lowq_packers.errors import NotFoundError

EXAMPLES = """Examples:
  lowq stop
  lowq stop demo
  lowq stop --all   (also those of lowq serve)"""


def stop(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Only servers of these models.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also servers that `lowq serve` started.")] = False,
    as_json: AsJson = False,
) -> None:
    """End the servers that --keep-alive left running; answers in progress are finished first."""
    from lowq_cli import running

    servers = [s for s in running.all_info() if s["kept"] or every]
    if models:
        servers = [s for s in servers if {m["name"] for m in s["models"] if m["state"] != "absent"} & set(models)]
        if not servers:
            raise NotFoundError(f"no background server has loaded {' or '.join(models)}; lowq ps lists all servers")
    for server in servers:
        running.stop(server["process"])
        console.say(f"stopped process {server['process']} ({', '.join(m['name'] for m in server['models'])})")
    if as_json:
        console.out_json({"stopped": servers})
    elif not servers:
        console.say("no background server is running; lowq ps lists all servers, lowq stop --all also ends those of lowq serve")
