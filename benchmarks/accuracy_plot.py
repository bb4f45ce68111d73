"""docs/img/accuracy.svg: perplexity against bits per weight, from benchmarks/results/accuracy/data_free.json."""

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
STYLES = {"hqq package": "s--", "rtn": "^:", "hqq": "d-.", "lsq": "o-"}


def main() -> None:
    """One panel per model, WikiText-2, fp32 companions; every width but 1 bit at groups 128, 64, 32."""
    report = json.loads((ROOT / "benchmarks" / "results" / "accuracy" / "data_free.json").read_text())
    dense = {r["model"]: r["ppl"]["wikitext2_test"] for r in report["rows"] if r["method"] == "fp32"}
    matplotlib.rcParams["svg.hashsalt"] = "lowq"  # the same file from the same numbers
    figure = Figure(figsize=(5.2 * len(dense), 4))
    panels = figure.subplots(1, len(dense), squeeze=False)
    for axis, (model, floor) in zip(panels[0], dense.items(), strict=True):
        for method, style in STYLES.items():
            rows = [r for r in report["rows"] if r["model"] == model and r["method"] == method and r["stored"] == "float32"]
            points = sorted((r["bpw"], r["ppl"]["wikitext2_test"]) for r in rows if r["bits"] > 1)
            if not points:
                continue
            axis.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1, label=method)
        axis.axhline(floor, color="grey", linewidth=0.8, label="unquantized")
        axis.set(title=f"{model}, WikiText-2 test", xlabel="bits per weight (16-bit scales and zeros)", yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks([2.5, 3, 3.5, 4, 5, 8.5], ["2.5", "3", "3.5", "4", "5", "8.5"])
        axis.set_yticks([35, 40, 50, 75, 100, 200, 400], ["35", "40", "50", "75", "100", "200", "400"])
        axis.minorticks_off()
        axis.legend(frameon=False)
    panels[0][0].set_ylabel("perplexity")
    figure.tight_layout()
    out = ROOT / "docs" / "img" / "accuracy.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
