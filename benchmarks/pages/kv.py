"""What a cache in few bits costs."""

import json

from pages import RESULTS, part, table


@part
def kv() -> str:
    """Perplexity beside a cache in 16 bits."""
    rows = json.loads((RESULTS / "accuracy" / "kv.json").read_text())["rows"]
    columns = (
        "model",
        ">dims of a head",
        ">`--kv`",
        ">of 16 bits' bytes",
        ">perplexity",
        ">in 16 bits",
        ">change",
        ">KL",
        ">top-1",
    )
    cells = [
        (
            r["model"],
            r["head_dim"],
            r["kv"],
            f"{r['bytes_of_16_bits']:.3f}",
            f"{r['ppl']:.2f}",
            f"{r['ppl_16']:.2f}",
            f"{r['increase_pct']:+.2f}%",
            f"{r['kl']:.4f}",
            f"{100 * r['top1']:.1f}%",
        )
        for r in rows
    ]
    return table(columns, cells)
