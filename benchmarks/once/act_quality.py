"""Measure the loss from 8-bit activations: perplexity and KL divergence.

    python benchmarks/once/act_quality.py --models DIR,DIR --texts FILE,FILE --out FILE.json [--bits 8,4,3,2]

Each model is quantized to each width (lsq, groups of 64), and its predictions in windows of 512 tokens are compared with those
of 16-bit activations: perplexity, KL divergence, agreement. Modes: int8, fp8, either but for the down projections, and what
`--act auto` takes. On CPUs rounding is the definition's. Rows of an earlier run stay in FILE.json, except those of the same
model and width.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lowq
from lowq_cli.calibrate.texts import tokenize, windows
from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.eight_bits import choose, own_text
from lowq_cli.evaluate.logits import device_of, logits_of
from lowq_cli.hf.activations import quantized_linears
from lowq_packers.scheme import Act

AT_ONCE = 16  # windows
Row = dict[str, Any]
Acts = dict[str, Act]  # by layers' names; those that are not in it take 16 bits


@torch.inference_mode()
def compared(model: Any, cut: torch.Tensor, modes: dict[str, Acts]) -> dict[str, Row]:
    """ppl, kl, agreement of each mode with 16-bit activations; ppl alone of those."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in modes}

    def logs(acts: Acts, part: torch.Tensor) -> torch.Tensor:
        set_acts(model, acts)
        return torch.log_softmax(logits_of(model, part)[:, :-1].float(), -1)

    for start in range(0, len(cut), AT_ONCE):
        part = cut[start : start + AT_ONCE]
        target, plain = part[:, 1:, None].to(device_of(model)), logs({}, part)
        for name, acts in modes.items():
            found = logs(acts, part) if acts else plain
            kl = (plain.exp() * (plain - found)).sum(-1).double().sum()
            same = (plain.argmax(-1) == found.argmax(-1)).double().sum()
            sums[name] += torch.stack([-found.gather(-1, target).double().sum(), kl, same]).cpu()
    n = len(cut) * (cut.shape[1] - 1)
    rows = {}
    for name, (nll, kl, same) in ((k, (v / n).tolist()) for k, v in sums.items()):
        rows[name] = {"ppl": float(torch.tensor(nll).exp())} | ({"kl": kl, "agreement": same} if modes[name] else {})
    return rows


@contextmanager
def quantized(folder: Path, width: int, device: str) -> Iterator[tuple[Any, Any, dict[str, Acts]]]:
    """The model in `width` bits, its tokenizer, and the modes by name but for `auto`."""
    with tempfile.TemporaryDirectory() as at:
        out = Path(at) / "m"
        lowq.quantize(str(folder), out=out, bits=width, group=64, lm_head="keep", device=device)
        model, tokenizer = ready(out, device)
        names = [n for n, m in model.named_modules() if m in set(quantized_linears(model))]
        modes: dict[str, Acts] = {"none": {}}
        for act in ("int8", "fp8"):
            modes[act] = dict.fromkeys(names, act)
            modes[f"{act}, down in 16 bits"] = {n: act for n in names if not n.endswith("down")}
        yield model, tokenizer, modes


def set_acts(model: Any, acts: Acts) -> None:
    for name, layer in model.named_modules():
        if layer in set(quantized_linears(model)):
            layer.set_act(acts.get(name, "none"))


def rows_of(folder: Path, texts: list[Path], bits: tuple[int, ...], device: str, tokens: int) -> Iterator[Row]:
    """A row for each width."""
    for width in bits:
        with quantized(folder, width, device) as (model, tokenizer, modes):
            choice = choose(model, own_text(model, tokenizer))
            modes["auto"] = dict.fromkeys(choice.rounded, choice.act)
            told = vars(choice) | {"said": str(choice)}
            row: Row = {"model": folder.name, "bits": width, "date": datetime.now(UTC).date().isoformat()}
            row |= {"torch": torch.__version__, "layers": len(modes["int8"]), "auto": told}
            for text in texts:
                cut = windows(tokenize(tokenizer, text.read_text()), 512, tokens)
                row[text.stem] = {"tokens": cut.numel(), **compared(model, cut, modes)}
            yield row


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths: Callable[[str], list[Path]] = lambda s: [Path(p) for p in s.split(",")]  # noqa: E731
    ask.add_argument("--models", type=paths, required=True)
    ask.add_argument("--texts", type=paths, required=True)
    ask.add_argument("--bits", type=lambda s: tuple(map(int, s.split(","))), default=(8, 4, 3, 2))
    ask.add_argument("--max-tokens", type=int, default=131_072)
    ask.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ask.add_argument("--out", type=Path, required=True)
    args = ask.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows: list[Row] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for folder in args.models:
        for row in rows_of(folder, args.texts, args.bits, args.device, args.max_tokens):
            rows = [r for r in rows if (r["model"], r["bits"]) != (row["model"], row["bits"])] + [row]
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
