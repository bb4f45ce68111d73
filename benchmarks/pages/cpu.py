"""docs/cpu.md: lowq beside llama.cpp. Results: cpu/llamacpp_1b.json, of cpu_llamacpp.py."""

from pages import part, read, table

RESULT = "cpu/llamacpp_1b.json"


def _pair(speeds: tuple[float, float]) -> tuple[str, str]:
    return f"{speeds[0]:.1f} / {speeds[1]:.1f}", f"{speeds[1] / speeds[0]:.2f}"


@part
def cpu_llamacpp() -> str:
    """Tokens per CPU second of both, from the least CPU time of the rounds."""
    report = read(RESULT)
    m, v, done = report["machine"], report["versions"], {name: found for name, found in report["rounds"].items() if found}
    rounds = min(map(len, done.values()))
    about = f"1B of Llama 3.2's shape, random weights, 16-bit embedding and head in both; {m['cpu']}, {m['threads']} thread of "
    about += f"{m['cores']} cores, load {m['load']} from other work; least CPU time of {rounds} round{'s' * (rounds > 1)} in "
    about += f"turn, {report['date'][:10]} (torch {v['torch']}, llama.cpp {v['llama.cpp']}). Prompt of {report['prompt']} "
    about += f"tokens, {report['new']} new ones after an empty context; tokens per second of CPU time:"
    rows = []
    for name, found in done.items():
        ours, theirs = ({k: min(r[who][k] for r in found) for k in found[0][who]} for who in ("lowq", "llama.cpp"))
        token = (theirs["long"] - theirs["short"]) / report["new"]
        start = theirs["long"] - (report["new"] + report["short"]) * token
        decode = (1 / token, report["new"] / ours["new"])
        prompt = (report["prompt"] / (theirs["read"] - start), report["prompt"] / ours["read"])
        peak = [max(r[who]["peak_mb"] for r in found) for who in ("llama.cpp", "lowq")]
        rows.append((name, *_pair(decode), *_pair(prompt), f"{peak[0]:,.0f} / {peak[1]:,.0f}"))
    heads = ("lowq, llama.cpp", ">decoding: llama.cpp / lowq", ">ratio", ">prompt: llama.cpp / lowq", ">ratio", ">peak MB")
    return f"{about}\n\n{table(heads, rows)}"
