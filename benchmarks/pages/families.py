"""docs/families.md: published folders, described families and their speed, every causal language model.

Results: accuracy/folders.json and families.json (`python -m tests.folders`, `tests.families`), */families_speed*.json,
cpu/state_dtype.json.
"""

import sys
from collections import Counter
from typing import Any

from lowq_cli.calibrate.residual_stream import why_not
from lowq_packers import arch
from lowq_packers.arch.config import NotPlain, read_config
from lowq_packers.arch.parts import mixers
from pages import RESULTS, ROOT, part, read, table, versions
from pages.work import flops, step_bytes


@part
def folders() -> str:
    """Published folders: what each is, and the steps taken with it."""
    found = read("accuracy/folders.json")
    steps = [k for k in found["rows"][0] if k not in ("family", "architecture", "vocabulary", "class", "template")]
    whole = sum(all(row[s] != "fails" for s in steps) for row in found["rows"])
    told = f"{len(found['rows'])} folders, {len(steps)} steps each (transformers {found['transformers']}, {found['date']}): "
    told += f"{whole} whole.\n\n"
    marks = {"yes": "+", "fails": "FAILS"}
    cells = [
        (
            row["family"],
            f"`{row['architecture']}`",
            row["vocabulary"],
            row["class"],
            row["template"],
            *(marks.get(row[s], "-") for s in steps),
        )
        for row in found["rows"]
    ]
    return told + table(("folder", "architecture", "vocabulary", "tokenizer class", "template", *steps), cells)


def decoder_of(row: dict[str, Any]) -> str:
    """Of a tiny model of transformers' defaults on a CPU: what is described decodes natively."""
    earlier = {"fused": "native", "unfused": "hf_eager", "plain": "hf_eager"}  # names at the time of the file
    described = row["family"] in arch.families()
    return "native" if described else earlier.get(row["decoder"], row["decoder"])


RUNS = ("h100/families_speed_prompts", "h100/families_speed_whole", "h200/families_speed_heads", "h200/families_published")


def shares() -> dict[str, str]:
    """Model type -> the share of reading in its last measured step of one sequence, and the GPU."""
    last = dict[str, str]()
    for name in ("h100/families_speed", *RUNS):
        for row in read(f"{name}.json")["rows"]:
            if "share" in row:
                last[row["family"].removeprefix("whole:")] = f"{row['share']:.0%} ({name[:4].upper()})"
    return last


@part
def described() -> str:
    """Every described family: its layers, and what follows from them, at a published size or, of CLASS_SIZES, its class's."""
    sys.path.insert(0, str(ROOT / "tests" / "families"))
    from sizes import CLASS_SIZES, CONFIGS

    cells, share = [], shares()
    for name, family in sorted(arch.families().items()):
        config = next((c for n, c in CONFIGS.items() if n.partition("/")[0] == name), None)
        if config is None and name not in CLASS_SIZES:  # the text part of a wrapper that has a row
            continue
        try:
            model = read_config({"model_type": name, "max_position_embeddings": 4096, **(config or CLASS_SIZES[name])})[1]
        except NotPlain:
            cells.append((f"`{name}`", "(this config is read by transformers)", "", "", "", ""))
            continue
        kinds = {type(mixer).__name__ for _, mixer in mixers(model)}
        rotates = "its tower reads and writes the stream" if model.outside_text else why_not(model) or "exact"
        formats = " ".join(f for f, held in (("GGUF", family.gguf), ("MLX", family.mlx)) if held)
        reading = share.get(name, share.get(f"{name}_text", ""))
        cells.append((f"`{name}`", ", ".join(sorted(kinds)), reading, "yes" if model.extra else "", rotates, formats))
    head = f"{len(arch.families())} model types are described; {len(cells)} are not the text part of another:\n\n"
    return head + table(("family", "layers", ">of reading", "further heads", "`--rotate`", "further formats"), cells)


@part
def speed() -> str:
    """Steps of described families on one GPU, before and after they were described."""
    now, before = (read(f"h100/families_speed{which}.json") for which in ("", "_before"))
    earlier = {row["family"]: row for row in before["rows"]}
    cells = []
    for row in now["rows"]:
        if "step_us" not in row:
            continue
        was = earlier.get(row["family"], {})
        cells.append(
            (
                f"`{row['family']}`",
                row["layers"],
                f"{was['step_us']:,.0f}" if was else "",
                f"{row['step_us']:,.0f}",
                f"{row['share']:.0%}",
                f"{row['tokens_per_s_8']:,}",
                f"{was['first_token_ms']:.1f}" if was else "",
                f"{row['first_token_ms']:.1f}",
            )
        )
    told = f"{now['gpu']}, torch {now['torch']}, transformers {now['transformers']}, {now['date'][:10]}; before: "
    told += f"{before['date'][:10]}, another machine of the kind. Memory reads {now['gbs']:,} GB/s.\n\n"
    head = ("family", ">layers", ">us a step, before", ">now", ">of reading", ">tokens/s of 8", ">first token, ms, before")
    return told + table((*head, ">now"), cells)


@part
def prompts() -> str:
    """The same in other runs: after prompts of recurrent layers and latents had kernels, of published models whole or cut,
    after attention of wide heads and of many queries had one, and of published mixtures and hybrids again."""
    told, head = "", ("family", ">layers", ">us a step", ">of reading", ">tokens/s of 8", ">first token, ms")
    for name in RUNS:
        found = read(f"{name}.json")
        cells = [
            (
                f"`{row['family'].removeprefix('whole:')}`" + (", published" if row["family"].startswith("whole:") else ""),
                row["layers"],
                f"{row['step_us']:,.0f}",
                f"{row['share']:.0%}",
                f"{row['tokens_per_s_8']:,}",
                f"{row['first_token_ms']:.1f}",
            )
            for row in found["rows"]
            if "step_us" in row
        ]
        told += f"{found['gpu']}, torch {found['torch']}, transformers {found['transformers']}, {found['date'][:10]}, one run. "
        told += f"Memory reads {found['gbs']:,} GB/s.\n\n" + table(head, cells) + "\n"
    return told


@part
def beside_vllm() -> str:
    """Families in lowq's server engine and in vLLM with its own kernels; a file a GPU of one machine."""
    told, by, dates = "", dict[str, dict[str, Any]](), list[str]()
    for path in sorted(RESULTS.glob("*/families_vllm*.json")):  # of a family that is in several, the last counts
        found = read(str(path.relative_to(RESULTS)))
        dates.append(found["date"][:10])
        for row in found["rows"]:
            by.setdefault(row["family"], {})[row["engine"]] = row
            if vllm := row.get("vllm", ""):
                told = f"{found['device']}, torch {found['torch']}, vLLM {vllm}, {min(dates)} to {max(dates)}; a family's row "
                told += f"is of one run. Answers after {found['prompt']} tokens.\n\n"
    cells = [cell for family, engines in by.items() if (cell := _beside(family, engines))]
    return told + table(("family", ">layers", *BESIDE), cells)


@part
def state_dtype() -> str:
    """What a recurrent state in bf16 changes in small models, and by how long it remembers."""
    found, cells = read("cpu/state_dtype.json"), list[tuple[str, ...]]()
    told = f"{found['text']}, windows of {found['length']:,} tokens ({found['date']}, {versions(found['versions'])}):\n\n"
    for row in found["rows"]:
        for state, of in row["states"].items():
            kl = [f"{of[key]:.1e}" if of["kl"] else "" for key in ("kl", "last_kl")]
            perplexities = (f"{of[key]:.3f}" for key in ("ppl", "last_ppl"))
            cells.append((row["mixer"], state, f"{row['tokens']:,}", *perplexities, *kl, f"{of['top1']:.2%}"))
    heads = ("layers", "state", ">tokens", ">perplexity", ">of the last quarter", ">KL to fp32", ">of the last quarter")
    told += table((*heads, ">same likeliest token"), cells)
    errors = [(mixer, *(f"{error:.1%}" for error in by.values())) for mixer, by in found["decays"].items()]
    columns = next(iter(found["decays"].values()))
    told += "\nRelative error of outputs with a state in bf16, by the share of the state that a token leaves:\n\n"
    return told + table(("layers", *(f">{decay}" for decay in columns)), errors)


@part
def work() -> str:
    """The same runs by what a family computes and reads, next to Llama's; lowq alone."""
    rows = dict[str, dict[str, Any]]()
    for path in sorted(RESULTS.glob("*/families_vllm*.json")):
        rows |= {row["family"]: row for row in read(str(path.relative_to(RESULTS)))["rows"] if row["engine"] == "lowq"}
    speed = read("h200/families_speed_heads.json")["gbs"]
    done = {name: _work(row, speed) for name, row in rows.items() if row.get("first")}
    llama = done["llama"]
    cells = []
    for name, (layers, share, rates) in done.items():
        of_prompts = [f"{rates[n]:.0f} ({llama[2][n] / rates[n]:.2f})" if n in rates else "" for n in llama[2]]
        cells.append((f"`{name}`", layers, f"{share:.0%}", *of_prompts))
    told = f"An H200 whose memory reads {speed:,} GB/s.\n\n"
    return told + table(("family", ">layers", ">of reading", ">TFLOP/s of 1,000 tokens (Llama's over it)", ">of 8,000"), cells)


def _work(row: dict[str, Any], speed: float) -> tuple[str, float, dict[int, float]]:
    """The layers, the share of a step of one sequence that reading weights takes, and TFLOP/s of prompts by their tokens."""
    from families_vllm import cut

    name = row["family"]
    model = read_config({"model_type": name.split("/")[0], "max_position_embeddings": 32768, **cut(name)[0]})[1]
    share = step_bytes(model, row["group"]) / speed / 1e9 * row["steps"][0]["tokens_per_s"]
    rates = {first["tokens"]: flops(model, first["tokens"]) / first["seconds"] / 1e12 for first in row["first"]}
    return f"{row['layers']} of {row['of_layers']}", share, rates


BESIDE = (">tokens/s of 1, lowq / vLLM", ">of 8", ">of 64", ">first token of 1,000, ms", ">of 8,000")


def _beside(family: str, engines: dict[str, Any]) -> tuple[object, ...] | None:
    """A row of a family that both engines ran; a ratio is of speeds, in times of first tokens as well."""
    own, other = engines.get("lowq", {}), engines.get("vllm", {})
    if "failed" in other or not own.get("steps") or not other.get("first"):
        return None
    steps = [(f"{a['tokens_per_s']:,.0f} / {b['tokens_per_s']:,.0f}", a["tokens_per_s"] / b["tokens_per_s"])
             for a, b in zip(own["steps"], other["steps"], strict=True)]  # fmt: skip
    own_firsts = {a["tokens"]: a["seconds"] for a in own["first"]}
    firsts = [(f"{1e3 * own_firsts[b['tokens']]:.1f} / {1e3 * b['seconds']:.1f}", b["seconds"] / own_firsts[b["tokens"]])
              for b in other["first"] if b["tokens"] in own_firsts]  # fmt: skip
    shown_cells = [f"{text} ({ratio:.2f})" for text, ratio in (*steps, *firsts)]
    return (f"`{family}`", f"{own['layers']} of {own['of_layers']}", *shown_cells, *[""] * (len(BESIDE) - len(shown_cells)))


@part
def families() -> str:
    """How many come through, and the rows of all."""
    sys.path.insert(0, str(ROOT / "tests" / "families"))
    from known import EXCEPTIONS

    found = read("accuracy/families.json")
    rows = found["rows"]
    told = f"{len(rows)} model types of transformers {found['transformers']} (torch {found['torch']}, {found['date']}): "
    decoders = Counter(decoder_of(r) for r in rows if r["family"] not in EXCEPTIONS)
    told += f"{len(rows) - len(EXCEPTIONS)} come through, {decoders['native']} of them in the native decoder; "
    told += f"{len(EXCEPTIONS)} do not.\n\n"
    kept = table(("does not", "why"), [(f"`{family}`", why) for family, why in sorted(EXCEPTIONS.items())])
    cells = [
        (f"`{r['family']}`", f"{r['coverage']:.0%}", f"{r['off']:.1%}", f"{r['exact']:.0e}", decoder_of(r))
        for r in rows
        if r["family"] not in EXCEPTIONS
    ]
    return told + kept + "\n" + table(("comes through", ">packed", ">logits off", ">dequantized", "decoder"), cells)


@part
def ranges() -> str:
    """How the part of the suite that depends on transformers came out on its versions."""
    rows = read("ranges.json")["rows"]
    named = list(rows[-1]["parts"])

    def cell(counts: dict[str, int]) -> str:
        bad = counts.get("failed", 0) + counts.get("error", 0)
        done = f"{counts.get('passed', 0)}"
        return f"{done}, **{bad} failed**" if bad else done

    cells = [(r["transformers"], r["torch"], r["date"], *(cell(r["parts"].get(name, {})) for name in named)) for r in rows]
    return table(("transformers", "torch", "date", *(f">{name}" for name in named)), cells)
