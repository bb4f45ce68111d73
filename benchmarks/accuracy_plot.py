"""docs/img/accuracy.svg: what quantizing adds to perplexity, by bits per weight, from results/accuracy/."""

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "accuracy"
FREE = {"hqq package": "s--", "rtn": "^:", "hqq": "d-.", "lsq": "o-"}
CALIBRATED = {"gptqmodel": "x--", "awq": "v:", "gptq": "o-", "learn": "*-"}
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def main() -> None:
    """One panel per model, WikiText-2; 4, 3 and 2 bits at groups 128, 64, 32. (At 8 bits what is added is chance.)"""
    free, calibrated = (json.loads((RESULTS / f"{n}.json").read_text())["rows"] for n in ("data_free", "calibrated"))
    dense = {r["model"]: r["ppl"]["wikitext2_test"] for r in free if r["method"] == "fp32"}
    series = {m: [r for r in free if r["method"] == m and r["stored"] == "float32"] for m in FREE}
    series |= {m: [r for r in calibrated if r["method"] == m and r["calib"] == "bundled"] for m in CALIBRATED}
    matplotlib.rcParams["svg.hashsalt"] = "lowq"  # the same file from the same numbers
    figure = Figure(figsize=(5.2 * len(dense), 4.4))
    panels = figure.subplots(1, len(dense), squeeze=False)
    for axis, (model, floor) in zip(panels[0], dense.items(), strict=True):
        for method, style in (FREE | CALIBRATED).items():
            rows = [r for r in series[method] if r["model"] == model and r["bits"] in (4, 3, 2)]
            if not rows:
                continue
            points = sorted((r["bpw"], 100 * (r["ppl"]["wikitext2_test"] / floor - 1)) for r in rows)
            told = f"{method}, calibrated" if method in CALIBRATED else method
            axis.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1, label=told)
        axis.set(title=f"{model}, WikiText-2 test", xlabel="bits per weight (16-bit scales and zeros)", yscale="log")
        axis.set_yticks(TICKS, [f"{t}%" for t in TICKS])
        axis.minorticks_off()
        axis.grid(alpha=0.2)
        axis.legend(frameon=False)
    panels[0][0].set_ylabel("perplexity above the unquantized model's")
    figure.tight_layout()
    out = ROOT / "docs" / "img" / "accuracy.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
