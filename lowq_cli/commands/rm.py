"""lowq rm: remove files that carry lowq's mark, or lowq's cache; nothing else."""

import sys
from typing import Annotated

import typer

from lowq_cli import completion, console
from lowq_packers.errors import UsageError

EXAMPLES = """Examples:
  lowq rm demo-lowq-4b-g64
  lowq rm --cached --yes"""


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names or paths that lowq ls lists.", autocompletion=completion.checkpoints),
    ] = None,
    cached: Annotated[bool, typer.Option("--cached", help="All that lowq ls lists in the cache.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout; with --yes.")] = False,
) -> None:
    """Remove what lowq wrote: checkpoints, exports, or what its cache holds; asks first."""
    from lowq_cli import inventory

    if not names and not cached:
        raise UsageError("name what to remove (lowq ls lists it), or --cached for all of the cache")
    holdings = inventory.named(names or [], cached, console.warn)
    if not yes:
        _ask([f"{h.path} ({h.kind}, {console.size(h.nbytes)})" for h in holdings], as_json)
    removed = []
    for h in holdings:
        if left := inventory.remove(h):
            console.warn(f"{h.path} stays: it holds {len(left)} files that lowq did not write, such as {left[0]}")
        else:
            removed.append(h)
            console.say(f"removed {h.path}")
    if as_json:
        console.out_json({"removed": [str(h.path) for h in removed], "bytes": sum(h.nbytes for h in removed)})


def _ask(what: list[str], as_json: bool) -> None:
    """Raise UsageError unless the person says yes, in a terminal."""
    if as_json or not sys.stdin.isatty():
        raise UsageError(f"removing {what[0] if len(what) == 1 else f'{len(what)} of them'} needs a confirmation; add --yes")
    for line in what:
        console.page(line)
    if what and input("remove? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was removed")
