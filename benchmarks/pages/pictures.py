"""Right answers about pictures by width."""

import json

from pages import RESULTS, milliseconds, part, read, table


@part
def pictures_right() -> str:
    """The small model that was trained on drawn pictures (pictures.json)."""
    found = read("pictures.json")
    n, m = found["pictures"], found["model"]
    cells = []
    for r in found["rows"]:
        widths = ("16, another picture shown", "16") if r.get("swapped") else (f"{r['bits']}", f"{r['vision']}")
        size = f"{r['bytes'] / 1e6:.1f} MB" if "bytes" in r else ""
        cells.append((*widths, size, *(f"{100 * r[k]:.1f}%" for k in ("names", "colours", "pairs"))))
    head = (
        f"The model is a toy that was made for this table (`benchmarks/pictures_train.py`): a tower and projector of "
        f"{m['sight'] / 1e6:.1f} M parameters in the form of Mistral 3 before a Llama of {m['text'] / 1e6:.1f} M that was "
        f"trained on text ({m['llama']}); trained for {m['seconds'] / 60:.1f} minutes on {m['alone']:,} drawings "
        f"without the Llama and {m['answers']:,} with it: digits of dots and three shapes in four colours, 64 x 64 pixels.\n"
        f"Right answers about {n} drawings that it was not trained on ({found['device']}), as\n"
        f"`lowq quantize --bits B --vision V` makes it by itself (of two drawings at once, {n // 2} pairs, all four words\n"
        f"have to be right; who guesses has 18% of the names and 25% of the colours right):\n\n"
    )
    columns = ("text, bits", "tower, bits", ">files", ">which digit or shape", ">its colour", ">two drawings")
    return head + table(columns, cells)


WHERE = {  # row of pictures.json -> what the table calls it
    "file to pixels": "decoding the JPEG (CPU)",
    "pixels to patches": "the processor (CPU)",
    "hash": "hash of the patches, BLAKE2; SHA-256 since (CPU)",
    "copies between processes": "packing for the engine's process (CPU)",
    "patches to the device": "copy to the GPU, normalising there",
    "tower": "that copy and the vision tower",
    "tower, recorded": "the same, the tower recorded",
    "prompt of 1054 tokens with a picture": "prompt: 1,024 rows of the picture and 30 tokens",
    "prompt of 1054 tokens with text": "as many tokens of text",
    "step after a picture": "a step after the picture",
    "step after text": "a step after text",
    "file to first token": "from the file to the first token",
}


@part
def pictures_first_token() -> str:
    """Where the first token of a picture goes: at first (h200/pictures.json), and before and since the tower's rotation and
    prepare's kernel are faster (h200/pictures_fused.json)."""
    results, fused = (json.loads((RESULTS / "h200" / f"{n}.json").read_text()) for n in ("pictures", "pictures_fused"))
    columns = [{r["what"]: r["ms"] for r in rows if "ms" in r} for rows in (results["first"], fused["before"], fused["first"])]
    cells = []
    for what, name in WHERE.items():
        times = (c.get(what) for c in columns)
        cells.append((name, *("" if t is None else f"{t:.1f}" if t >= 10 else f"{t:.2f}" for t in times)))
    head = (
        f"{results['gpu']}, {results['layers']} layers of an 8B of Qwen3-VL's shape in 4 bits g128, random weights, tower of "
        f"27 layers in bf16, a JPEG of 1,024 x 1,024 pixels; the fastest of 15 runs, ms; the last two columns are one run:\n\n"
    )
    dates = (f">{results['date'][:10]}", f">{fused['date'][:10]}, operations apart", f">{fused['date'][:10]}, fused")
    return head + table(("part", *dates), cells)


PASSES = {"launched": "launched kernel by kernel", "recorded": "recorded"}


@part
def pictures_passes() -> str:
    """16 users who send pictures, before their passes were recorded and since (h200/pictures_passes.json)."""
    cells = []
    for r in read("h200/pictures_passes.json")["rows"]:
        if r.get("passes") in PASSES:
            m, seen = r["mixed"], r["picture"]
            times = (milliseconds(seen["first_ms"]), milliseconds(seen["between_ms"], 1))
            cells.append((PASSES[r["passes"]], f"{r['tokens_per_s']:,.0f}", *times, m["n"], f"{m['total_s']:.1f}"))
    columns = ("passes with prompts", ">tokens/s", ">first token, ms", ">between tokens, ms", ">such passes", ">their time, s")
    return table(columns, cells)


@part
def pictures_recorded() -> str:
    """Users who send pictures, their passes recorded, the tower launched or recorded (h200/pictures_recorded.json)."""
    report, cells = read("h200/pictures_recorded.json"), []
    for r in report["rows"]:
        times = [milliseconds(r[kind][what], digits) for kind in ("picture", "text") if kind in r for what, digits in TIMES]
        users, times = f"{r['pictures']} + {r['texts']}", times + [""] * (4 - len(times))
        cells.append((users, r["tower"], f"{r['tokens_per_s']:,.0f}", *times))
    columns = ("tower", ">tokens/s", ">picture's first token", ">between", ">text's first token", ">between")
    head = f"{report['gpu']}, {report['date']}, variants of one engine in turn, `--prefer smooth` unless said; ms p50 / p99:"
    return f"{head}\n\n{table(('>users, pictures + texts', *columns), sorted(cells, key=lambda c: str(c[0]), reverse=True))}"


TIMES = (("first_ms", 0), ("between_ms", 1))
SERVED = {
    "export": "vLLM 0.24, its own kernels",
    "lowq": "lowq serve",
}


@part
def pictures_vllm() -> str:
    """vLLM's server, and lowq's, under users who send pictures (h200/pictures_http.json)."""
    report, lines = read("h200/pictures_http.json"), []
    for server, row in report["servers"].items():
        date = f"{row['date'][:10]} {row['date'][11:16]}"
        for r in (v for k, v in row.items() if k.startswith("users_")):
            times = (milliseconds(r["ttft_ms"]), milliseconds(r["between_ms"], 1))
            lines.append((SERVED[server], date, r["users"], f"{r['tokens_per_s']:,.0f}", *times))
    columns = ("server", "measured", ">users", ">tokens/s", ">first token, ms p50 / p99", ">between tokens")
    lines.sort(key=lambda line: line[2])
    return f"Over HTTP, {report['device']}, all {report['layers']} layers:\n\n{table(columns, lines)}"
