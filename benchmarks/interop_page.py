"""The tables of docs/formats.md: what other tools make of our exports, and two GPUs beside one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Markdown = Callable[[Any, Any], str]


def judged(markdown: Markdown) -> str:
    """Each export beside the tool that read it."""
    report = json.loads((RESULTS / "accuracy" / "interop.json").read_text())
    lines = []
    for r in report["rows"]:
        scheme = f"{r['bits']}-bit g{r['group']}" + (f", {r['zero']} zero" if "zero" in r else "")
        if "matrices" in r:
            found, ours = f"{r['equal']} of {r['matrices']} matrices equal, every weight", ""
        else:
            close = r.get("largest_logit_difference")
            told = f"logits differ by {close:.1g} at most" if close is not None else f"{r['difference_pct']:+.3f}%"
            found, ours = f"perplexity {r['ppl']:.3f} ({told})", f"{r['our_ppl']:.3f}"
        lines.append((r["format"] + (f" {r['type']}" if "type" in r else ""), r["reader"], scheme, found, ours))
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    told = f"Model `{report['model']}`, {report['text']}; {report['date']}, on a CPU ({versions}).\n\n"
    return told + markdown(("export", "read by", "scheme", "found", ">ours"), lines)


def two_gpus(markdown: Markdown) -> str:
    """Quantizing and decoding on two GPUs beside one."""
    report = json.loads((RESULTS / "h200x2" / "two_gpus.json").read_text())
    lines = []
    for r in report["rows"]:
        if r["what"] == "quantize":
            count = len(r["devices"].split(","))
            lines.append((f"quantize, {r['method']}", count, f"{r['seconds']:.1f} s for {r['GB']:.1f} GB", ""))
        elif r["what"] == "files":
            lines[-1] = (*lines[-1][:3], "the same bytes" if r["equal"] else "NOT the same bytes")
        elif r["what"] == "generate":
            n, speed = r["processes"], f"{r['decode_tps']:.0f} tokens/s ({r['decoder']} decoder), {r['memory_GB']:.2f} GB each"
            lines.append((f"decode, {r['model']}", n, speed, ""))
        else:
            same = sum(a == b for a, b in zip(r["tokens"], r["equal_tokens_in_front"], strict=True))
            text = f"{same} of {len(r['tokens'])} texts of {r['tokens'][0]} tokens the same; logits within "
            lines[-1] = (*lines[-1][:3], f"{text}{r['largest_logit_difference']:.2g} of {r['largest_logit']:.1f}")
    shape, versions = report["shape"], ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    told = f"{report['layers']} layers of {shape['hidden_size']} x {shape['intermediate_size']}, random weights; "
    told += f"{report['date']}, {report.get('gpu', 'CPU')} ({versions}).\n\n"
    return told + markdown(("what", ">GPUs", "measured", "compared"), lines)
