"""docs/accuracy.md: seconds of a plan, and those that the run took. Results: <device>/quantize_estimates.json."""

from pages import RESULTS, part, read, table, versions


@part
def estimates() -> str:
    """A row per run."""
    lines, told = [], []
    for path in sorted(RESULTS.glob("*/quantize_estimates.json")):
        report = read(f"{path.parent.name}/quantize_estimates.json")
        told.append(f"{report['date']} on {path.parent.name} ({versions(report['versions'])})")
        for r in report["rows"]:
            times = (f"{r['estimated_seconds']:.1f}", f"{r['seconds']:.1f}", f"{r['over_estimate']:.2f}")
            tokens = f"{r['calib_tokens']:,}" if "calib_tokens" in r else "none"
            lines.append((r["model"], r["method"], f"{r['bits']}-bit g64", tokens, *times, f"{r['load_before']:.1f}"))
    columns = ("model", "method", "", ">tokens", ">s in the plan", ">s taken", ">taken over plan", ">load before")
    return f"Measured {'; '.join(told)}; a core that other work shared, `load` processes on two.\n\n{table(columns, lines)}"
