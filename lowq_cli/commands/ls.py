"""lowq ls: list the folders and files that lowq has written on this disk."""

from lowq_cli import console
from lowq_cli.commands import AsJson

EXAMPLES = """Examples:
  lowq ls
  lowq ls --json"""


def ls(as_json: AsJson = False) -> None:
    """List what lowq wrote on this disk: checkpoints, exports, and what its cache holds besides compiled kernels."""
    from lowq_cli import inventory

    holdings = inventory.holdings(console.warn)
    total = sum(h.nbytes for h in holdings)
    if as_json:
        rows = [
            {"name": h.short, "path": str(h.path), "kind": h.kind, "bytes": h.nbytes, "age_s": round(h.age_s)} for h in holdings
        ]
        console.out_json({"holdings": rows, "bytes": total})
        return
    if not holdings:
        console.say("nothing yet; lowq quantize demo writes a checkpoint")
        return
    cells = [(h.short, h.kind, console.size(h.nbytes), console.age(h.age_s)) for h in holdings]
    console.table("", ("name", "kind", ">size", ">age"), cells, on_stdout=True, spare=(">age", "kind"))
    count = "1 place" if len(holdings) == 1 else f"{len(holdings)} places"
    console.say(f"{console.size(total)} in {count}; lowq rm NAME removes one, lowq rm --cached all of the cache")
