"""lowq ps: list this user's running servers and their models."""

from lowq_cli import console
from lowq_cli.commands import AsJson

EXAMPLES = """Examples:
  lowq ps
  lowq ps --json"""


def ps(as_json: AsJson = False) -> None:
    """List the servers that are running: those of `lowq serve`, and those that --keep-alive left running."""
    from lowq_cli import running

    servers = running.all_info()
    if as_json:
        console.out_json({"servers": servers})
        return
    if not servers:
        console.say("no server is running; lowq serve starts one, lowq run MODEL TEXT --keep-alive 10m keeps one")
        return
    cells = []
    for server in servers:
        loaded = [m for m in server["models"] if m["state"] != "absent"]
        where = server["url"] or "in the background"
        for model in loaded or [{"name": "-", "state": "", "bytes": 0}]:
            size = console.size(model["bytes"]) if model["bytes"] else ""
            cells.append((server["process"], where, model["name"], model["state"], size, console.age(server["idle_s"])))
    console.table("", (">process", "where", "model", "state", ">memory", ">idle"), cells, on_stdout=True)
