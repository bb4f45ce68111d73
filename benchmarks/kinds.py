"""Measure what quantizing costs by kind of tensor: experts visited often and seldom, and the projections of a hybrid.

    python benchmarks/kinds_models.py FOLDER --model MODELS/story --data DATA        trains both models first
    python benchmarks/kinds.py FOLDER --data DATA [--parts mixture,hybrid] [--calib-tokens 8192] [--out FILE]

mixture: `lowq quantize` by each method and width, on the bundled text. `experts` has a list of each: layer, expert, its visits
in that text and in the text evaluated, and twice the squared error of its output over the output's square, on the evaluated
tokens that the original model routes to it: with the original's inputs, and with those of the quantized model (`drifted`).
`least_over_most`: the error of the least visited quarter of a layer's experts over that of the most visited quarter, geometric
mean over layers.
hybrid: one kind of tensor at a time by its width's default method, all others in 16 bits. KL divergence in nats a token, and
per million weights of the kind. Rows come into benchmarks/results/<device>/kinds.json, written after each.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accuracy import ours
from accuracy_rows import Row, device, ints, words
from pages import results_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowq
from lowq_cli.calibrate import texts
from lowq_cli.evaluate import perplexity
from lowq_cli.hf.dequantize import dequantize
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_packers.scheme import Scheme

GROUP, TEXT, BATCH = 64, "mix_valid_sample.txt", 4  # group size; the text evaluated; windows at once
PER_LAYER = 4  # experts of a layer over those of its least and most visited part
Errors = dict[tuple[int, int], float]  # layer, expert -> relative squared error


def loaded(folder: Path) -> Any:
    """The unquantized model in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device()).eval()


def quantized(folder: Path, recipe: Any) -> tuple[Any, float]:
    """What `lowq quantize` makes, as transformers' model in fp32, and its seconds."""
    with tempfile.TemporaryDirectory() as out:
        with pipeline.prepare(folder, recipe, Path(out) / "q", device=device()) as prepared:
            *_, finished = pipeline.execute(prepared)
        model, _ = lowq.load(Path(out) / "q", device=device())
        return dequantize(model, torch.float32).eval(), round(finished.result.seconds, 1)  # type: ignore[union-attr]


@contextmanager
def entering(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Collects (inputs (tokens, H), chosen experts (tokens, k)) of each layer's experts in order, as the model runs."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts = [m for n, m in model.named_modules() if n.endswith(".experts")]
    hooks = [m.register_forward_pre_hook(lambda _, x: seen.append((x[0], x[1]))) for m in experts]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def visits(model: Any, windows: torch.Tensor) -> dict[tuple[int, int], int]:
    """(layer, expert) -> tokens of the windows that visit it."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for batch in windows.split(BATCH):
        with entering(model) as seen:
            model(batch.to(device()), use_cache=False)
        for layer, (_, chosen) in enumerate(seen):
            for expert, count in enumerate(chosen.flatten().bincount(minlength=model.config.num_local_experts).tolist()):
                counts[layer, expert] += count
    return dict(counts)


def output(experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert's output (tokens, H)."""
    gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].T


@torch.inference_mode()
def errors(dense: Any, model: Any, windows: torch.Tensor) -> tuple[Errors, Errors]:
    """The relative squared error of every expert's output, with the original's inputs and with the quantized model's."""
    power: dict[tuple[int, int], torch.Tensor] = defaultdict(lambda: torch.zeros(3, device=device(), dtype=torch.float64))
    stacks = [[layer.mlp.experts for layer in m.model.layers] for m in (dense, model)]
    for batch in windows.split(BATCH):
        with entering(dense) as clean:
            dense(batch.to(device()), use_cache=False)
        with entering(model) as drifted:
            model(batch.to(device()), use_cache=False)
        for layer, (old, new, (x, chosen), (moved, _)) in enumerate(zip(*stacks, clean, drifted, strict=True)):
            for e in range(dense.config.num_local_experts):
                mine = chosen.eq(e).any(-1)
                y = output(old, e, x[mine])
                made = y, output(new, e, x[mine]) - y, output(new, e, moved[mine]) - y
                power[layer, e] += torch.stack([t.double().square().sum() for t in made])
    own = {at: float(p[1] / p[0]) for at, p in power.items() if p[0] > 0}
    return own, {at: float(p[2] / p[0]) for at, p in power.items() if p[0] > 0}


def least_over_most(found: Errors, counts: dict[tuple[int, int], int]) -> float:
    """The error of each layer's least visited quarter of experts over its most visited quarter's; geometric mean of layers."""
    logs = []
    for layer in sorted({at[0] for at in found}):
        order = [found[at] for at in sorted((at for at in found if at[0] == layer), key=lambda at: counts[at])]
        some = max(1, len(order) // PER_LAYER)
        logs.append(math.log(sum(order[:some]) / sum(order[-some:])))
    return math.exp(sum(logs) / len(logs))


def mixture(folder: Path, ids: torch.Tensor, args: argparse.Namespace) -> Iterator[Row]:
    """Visits, then a row per method and width."""
    dense = loaded(folder)
    cut = texts.windows(ids)
    calib = texts.Text.read(None).windows(AutoTokenizer.from_pretrained(folder), args.calib_tokens, dense)
    read, judged = visits(dense, calib), visits(dense, cut)
    by_layer = [[n for (layer, _), n in read.items() if layer == i] for i in range(dense.config.num_hidden_layers)]
    about = {"calib_tokens": calib.numel(), "tokens": cut.numel(), "ppl": round(perplexity.evaluate(dense, ids).ppl, 3)}
    yield {"part": "mixture", "shares": [[round(n / sum(some), 4) for n in sorted(some)] for some in by_layer], **about}
    for method in args.method:
        for bits in args.bits:
            how: Row = {} if method == "auto" else {"calib": "bundled", "calib_tokens": args.calib_tokens}
            model, seconds = quantized(folder, make_recipe(bits=bits, group=GROUP, method=method, lm_head="keep", **how))
            own, drifted = errors(dense, model, cut)
            loss = perplexity.evaluate(model, ids, dense)
            rows = [[*at, read[at], judged[at], round(own[at], 6), round(drifted[at], 6)] for at in own]
            yield {
                "part": "mixture", "method": method, "bits": bits, "calib_tokens": calib.numel(), "kl": round(loss.kl or 0, 5),
                "ppl": round(loss.ppl, 3), "seconds": seconds, "least_over_most": round(least_over_most(own, read), 4),
                "least_over_most_drifted": round(least_over_most(drifted, read), 4), "experts": rows,
            }  # fmt: skip


def kinds_of(model: Any) -> dict[str, list[torch.nn.Linear]]:
    """Kind -> its linears: the last name of the path, with that of its part."""
    kinds = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            kinds[".".join(name.split(".")[-2:])].append(module)
    return dict(kinds)


def hybrid(folder: Path, ids: torch.Tensor, args: argparse.Namespace) -> Iterator[Row]:
    """A row per width and kind, then all kinds together, and all but those that are few."""
    dense, model = loaded(folder), loaded(folder)
    kinds = kinds_of(model)
    yield {"part": "hybrid", "tokens": texts.windows(ids).numel(), "ppl": round(perplexity.evaluate(dense, ids).ppl, 3)}
    few = [k for k in kinds if k.endswith(("in_proj_a", "in_proj_b"))]
    together = {"all": list(kinds), "all but in_proj_a, in_proj_b": [k for k in kinds if k not in few]}
    for bits in args.bits:
        for name, chosen in {**{k: [k] for k in kinds}, **together}.items():
            some = [m for k in chosen for m in kinds[k]]
            before = [m.weight.data for m in some]
            for m in some:
                m.weight.data = ours(m.weight.data, Scheme(bits, GROUP))
            loss, weights = perplexity.evaluate(model, ids, dense), sum(w.numel() for w in before)
            for m, w in zip(some, before, strict=True):
                m.weight.data = w
            about = {"part": "hybrid", "kind": name, "bits": bits, "weights": weights, "matrices": len(some)}
            yield about | {"kl": float(f"{loss.kl or 0:.4g}"), "kl_per_million": round((loss.kl or 0) / weights * 1e6, 5)}


def main() -> None:
    """Measure; the file is written after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", type=words, default=["mixture", "hybrid"])
    parser.add_argument("--method", type=words, default=["auto", "gptq"])
    parser.add_argument("--bits", type=ints, default=[4, 3, 2])
    parser.add_argument("--tokens", type=int, default=8192, help="of the text evaluated")
    parser.add_argument("--calib-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    on = torch.cuda.get_device_name() if device() == "cuda" else "cpu"
    out = args.out or results_of(on) / "kinds.json"
    versions = {p: importlib.metadata.version(p) for p in ("lowq", "torch", "transformers")}
    rows: list[Row] = []
    report: Row = {"date": datetime.date.today().isoformat(), "device": on, "versions": versions}
    report |= {"text": TEXT, "group": GROUP, "trained": json.loads((args.folder / "trained.json").read_text()), "rows": []}
    for part in args.parts:
        folder = args.folder / part
        ids = perplexity.tokenize(AutoTokenizer.from_pretrained(folder), (args.data / TEXT).read_text())[: args.tokens]
        for row in {"mixture": mixture, "hybrid": hybrid}[part](folder, ids, args):
            rows.append(row)
            print({k: v for k, v in row.items() if k != "experts"}, flush=True)
            lines = ",\n".join(json.dumps(r) for r in rows)  # a row on one line: it has a list for every expert
            out.write_text(json.dumps(report, indent=1).replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")


if __name__ == "__main__":
    main()
