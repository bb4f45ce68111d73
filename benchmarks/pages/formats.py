"""docs/formats.md: exports read by other tools, GGUF's types, two GPUs compared with one.

Results: accuracy/interop.json, accuracy/gguf_types.json, h200x2/two_gpus.json.
"""

from typing import Any

from pages import part, read, table, versions


@part
def judged() -> str:
    """Each export and the tool that read it; widths of which every matrix was looked at share a line."""
    report = read("accuracy/interop.json")
    lines, counted = [], dict[tuple[str, ...], list[dict[str, Any]]]()
    for r in report["rows"]:
        zero = f", {r['zero']} zero" if "zero" in r else ""
        scheme = f"{r['bits']}-bit g{r['group']}{zero}"
        if "matrices" in r:
            counted.setdefault((r["format"], r["reader"], f"g{r['group']}{zero}"), []).append(r)
        elif "family" in r:
            close = f"logits differ by {r['largest_logit_difference']:.1g} of {r['largest_logit']:.2f} at most"
            lines.append((r["format"], r["reader"], scheme, f"{r['family']}, tiny and random: {close}", ""))
        else:
            close = r.get("largest_logit_difference")
            told = f"logits differ by {close:.1g} at most" if close is not None else f"{r['difference_pct']:+.3f}%"
            name = r["format"] + (f" {r['type']}" if "type" in r else "")
            lines.append((name, r["reader"], scheme, f"perplexity {r['ppl']:.3f} ({told})", f"{r['our_ppl']:.3f}"))
    for (name, reader, scheme), rows in counted.items():
        equal, all_of = sum(r["equal"] for r in rows), sum(r["matrices"] for r in rows)
        what = "have the shapes and dtypes it expects" if "schema" in reader else "equal, every weight"
        widths = ", ".join(str(r["bits"]) for r in rows)
        lines.append((name, reader, f"{widths}-bit {scheme}", f"{equal} of {all_of} matrices {what}", ""))
    tokens = max(r.get("tokens", 0) for r in report["rows"])
    told = f"Model `{report['model']}`, {report['text']}, {tokens:,} tokens; {report['date']}, on a CPU "
    told += f"({versions(report['versions'])}).\n\n"
    return told + table(("export", "read by", "scheme", "result", ">ours"), lines)


@part
def gguf_types() -> str:
    """What each of GGUF's block types loses by lowq's search, by llama.cpp's, and by rounding as its definition has it."""
    report = read("accuracy/gguf_types.json")
    columns = ("type", ">bits", ">lowq", ">llama.cpp", ">rounded", ">squared error relative to llama.cpp")
    lines = [
        (
            r["type"],
            f"{r['bits']:.4g}",
            *(f"{r[n]:.4f}" for n in ("lowq", "llama.cpp", "plain")),
            _less(r["lowq"], r["llama.cpp"]),
        )
        for r in report["rows"]
    ]
    told = (
        f"Relative errors of the linears of layers {' and '.join(report['layers'])} of `{report['model']}`, without a text.\n\n"
    )
    return told + table(columns, lines)


def _less(ours: float, theirs: float) -> str:
    return f"{100 * ((ours / theirs) ** 2 - 1):+.0f}%"


@part
def two_gpus() -> str:
    """Quantizing and decoding on two GPUs compared with one."""
    report = read("h200x2/two_gpus.json")
    lines: list[tuple[object, ...]] = []
    alone = 0.0
    for r in report["rows"]:
        layers = r.get("layers", report["layers"])
        if r["what"] == "quantize":
            count, rate = len(r["devices"].split(",")), r["GB"] / r["seconds"]
            alone = r["seconds"] if count == 1 else alone
            told = f"{r['seconds']:.1f} s for {r['GB']:.1f} GB, {rate:.1f} GB/s"
            lines.append(
                (f"quantize, {r['method']}, {layers} layers", count, told, f"{alone / r['seconds']:.2f}x" * (count > 1))
            )
        elif r["what"] == "files":
            lines[-1] = (*lines[-1][:3], f"{lines[-1][3]}, {'the same' if r['equal'] else 'NOT the same'} bytes")
        elif r["what"] == "generate":
            n, speed = r["processes"], f"{r['decode_tps']:.0f} tokens/s ({r['decoder']} decoder), {r['memory_GB']:.2f} GB each"
            lines.append((f"decode, {r['model']}", n, speed, ""))
        else:
            same = sum(a == b for a, b in zip(r["tokens"], r["equal_tokens_in_front"], strict=True))
            text = f"{same} of {len(r['tokens'])} texts of {r['tokens'][0]} tokens the same; logits within "
            lines[-1] = (*lines[-1][:3], f"{text}{r['largest_logit_difference']:.2g} of {r['largest_logit']:.1f}")
    shape = report["shape"]
    told = f"Layers of {shape['hidden_size']} x {shape['intermediate_size']}, random weights, files in memory; "
    told += f"{report['date']}, {report.get('gpu', 'CPU')} ({versions(report['versions'])}).\n\n"
    return told + table(("what", ">GPUs", "measured", "compared"), lines)
