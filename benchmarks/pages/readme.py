"""docs/results.md: one short table for each question that a newcomer asks; and README.md's list of commands."""

from pages import part, read, shown, table
from pages.cuda import best_peers, measured_cells
from pages.decode import label, mark, other_runs
from pages.vllm import HTTP, HTTP_SERVERS, newest_last

PRODUCTS = ((4096, 4096), (4096, 14336), (28672, 4096))  # an 8B Llama's o, down, and gate with up
ROWS = (1, 4, 16, 64, 256, 1024)  # of x
VARIANTS = ("transformers", "transformers-compile", "transformers-static", "16", "8", "4", "4g64", "4h8", "4h4", "3", "3h8",
            "2", "2h8", "2h4")  # fmt: skip


@part
def commands() -> str:
    """The verbs with the first line of their help."""
    from lowq_cli import main

    verbs = [(c.name, (c.callback.__doc__ or "").strip().splitlines()[0]) for c in main.app.registered_commands if c.callback]
    return table(("command", "what it does"), [(f"`lowq {name}`", told) for name, told in verbs])


@part
def headline() -> str:
    """The one sentence of the README with numbers."""
    report = read("h100/decode_8b.json")
    speed = {r["variant"]: f"{r['tokens_per_s']:.0f}" for r in report["rows"] if r.get("batch") == 1}
    return (
        f"On one {report['device']} a model of 8B parameters writes {speed['4']} tokens/s at 4 bits with lowq. "
        "In 16 bits it writes\n"
        f"{speed['16']} with lowq, {speed['transformers-compile']} with transformers and torch.compile, and "
        f"{speed['transformers']} with plain transformers (batch 1).\n"
    )


@part
def measured() -> str:
    """All tables of docs/results.md."""
    return "\n".join((_accuracy(), _decode(), _serving(), _products(), _cpu()))


def _accuracy() -> str:
    """Perplexity at group 64 of the base model, WikiText-2."""
    free, calibrated = read("accuracy/data_free.json"), read("accuracy/calibrated.json")
    text = "wikitext2_test"
    dense = next(r["ppl"][text] for r in free["rows"] if r["model"] == "base" and "bits" not in r)
    cells = {
        (r["bits"], r["method"], r["stored"]): r["ppl"][text]
        for r in [*free["rows"], *calibrated["rows"]]
        if r["model"] == "base" and r.get("group") == 64 and r.get("calib") in (None, "bundled")
    }
    methods = (("hqq package", "float32"), ("rtn", "float32"), ("lsq", "bfloat16"), ("gptq", "bfloat16"))
    widths = sorted({b for b, _, _ in cells}, reverse=True)
    rows = [(f"{bits}-bit g64", *(shown(cells.get((bits, *m)), ",.1f") for m in methods)) for bits in widths]
    columns = ("", ">hqq package", ">rounding", ">lowq without data (lsq)", ">lowq calibrated (gptq)")
    head = f"**Perplexity** on WikiText-2 of a 21.9M-parameter Llama ({dense:.1f} in 16 bits; small models quantize badly):\n"
    return f"{head}\n{table(columns, rows)}"


def _decode() -> str:
    """Tokens per second of a whole model."""
    report = read("h100/decode_8b.json")
    found = {r["variant"]: r for r in report["rows"] if r.get("batch") == 1}
    rows = [
        (label(v) + mark(r), f"{r['tokens_per_s']:.0f}", f"{r['ms_per_step']:.2f}", f"{r['roofline_pct']:.0f}%")
        for v, r in ((v, found[v]) for v in VARIANTS if v in found)
    ]
    head = f"**Decoding** an 8B Llama-3.1-shaped model on one {report['device']}, batch 1, prompt {report['prompt']}:\n"
    return f"{head}\n{table(('', '>tokens/s', '>ms per token', '>of the read roofline'), rows)}{other_runs(found.values())}"


def _serving() -> str:
    """Tokens per second of many users together, by server."""
    report = next(r for r in reversed(newest_last(HTTP)) if r["servers"].keys() >= HTTP_SERVERS.keys())
    found = {
        name: {k: r for k, r in report["servers"][server].items() if k.startswith("users_")}
        for server, name in HTTP_SERVERS.items()
    }
    users = [k for k in found[HTTP_SERVERS["lowq"]] if all(k in rows for rows in found.values())]
    rows = [(name, *(f"{of[k]['tokens_per_s']:,.0f}" for k in users)) for name, of in found.items()]
    head = (
        f"**Serving** the same shape at 4 bits g128 over HTTP on one {report['device']}, tokens/s of all users together, "
        "prompts and answers of mixed lengths, one run. Waiting times, and what each engine is for: "
        "[serving](serving.md)\n"
    )
    counts = [int(k.removeprefix("users_")) for k in users]
    return f"{head}\n{table(('', *(f'>{n} user' + 's' * (n > 1) for n in counts)), rows)}"


def _products() -> str:
    """One layer at 4 bits compared with the best of the peers, from the rows of docs/cuda.md."""
    mine, peers = measured_cells(4), best_peers(4)
    rows = []
    for key in sorted(k for k in mine if k in peers and k[:2] in PRODUCTS and k[2] in ROWS):
        (N, K, M), one, (us, name) = key, mine[key], peers[key]
        peer = f"{us:.1f} {name.removesuffix('_bf16')}"
        rows.append((f"{N}x{K}", M, f"`cuda/tile_{one.kernel}`", f"{one.us:.1f}", peer, f"{us / one.us:.2f}x"))
    head = (
        "**One linear layer**, 4 bits, group 128, float zeros, microseconds of what dispatch picks on one H100; the peers "
        "(without zeros) in an earlier run on the same kind of GPU. All layers, widths, and cuBLAS: "
        "[CUDA kernels](cuda.md)\n"
    )
    return f"{head}\n{table(('N x K', '>M', 'kernel', '>lowq', '>best peer', '>as fast'), rows)}"


def _cpu() -> str:
    """Decoding on two CPU cores."""
    report = read("cpu/decode_1b.json")
    rows = [(label(r["variant"]), f"{r['cpu_ms_per_step']:.0f}") for r in report["rows"]]
    about = f"a 1B Llama-3.2-shaped model, batch 1, {report['threads']} threads (torch {report['versions']['torch']}"
    head = f"**Without a GPU**: {about}, {report['date'][:10]}).\nCPU time of all threads, since the machine had other work:\n"
    return f"{head}\n{table(('', '>CPU ms a token'), rows)}"
