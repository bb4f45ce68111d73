"""docs/cli.md: how long the commands take from shell to shell. Results: */walk_8b.json and walk_1b.json, of walk_8b.py."""

from pages import RESULTS, part, read, table


@part
def walk() -> str:
    """A table a device that the walk was measured on."""
    parts = []
    for path in sorted(RESULTS.glob("*/walk_*b.json")):
        report = read(str(path.relative_to(RESULTS)))
        shape = {"8b": "8B, Llama 3.1's shape", "1b": "1B, Llama 3.2's shape"}[report["shape"]]
        about = f"{shape}, random weights, {report['model_gb']:.1f} GB in the page cache, {report['device']}, "
        about += f"{report['date'][:10]} (lowq {report['lowq']}, torch {report['torch']}); seconds of fresh processes:"
        rows = [
            (
                f"{r['what']}{' (an earlier run)' * ('date' in r)}",
                f"`{r['command']}`" * bool(r["command"]),
                f"{r['seconds']:.1f}",
            )
            for r in report["rows"]
        ]
        parts.append(f"{about}\n\n{table(('', 'command', '>seconds'), rows)}")
    return "\n".join(parts) or "Not measured yet: `python benchmarks/walk_8b.py` on a GPU writes the table.\n"
