"""Generate the model card of a checkpoint from its report."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lowq_cli.console import size, visible
from lowq_cli.files.checkpoint import Checkpoint
from lowq_cli.files.front_matter import LICENSE
from lowq_cli.interop.export_checks import commands

CARD = "README.md"
FEW = 4  # max. values of a list that the card spells out


def model_card(checkpoint: Checkpoint, repo: str, base: str | None = None, measured: Mapping[str, Any] | None = None) -> str:
    """The card's Markdown, with the front matter that huggingface.co reads.

    base: the original model; by default the report's source if that is a hub id.
    measured: `perplexity.Report`'s fields, of an evaluation against `base`.
    """
    report = checkpoint.report
    source = base or report.get("source")
    hub = source if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) else None
    front = ["---", "library_name: transformers", "tags:", "- lowq", "- quantized"]
    if hub:
        front += [f"base_model: {hub}", "base_model_relation: quantized"]
    front += [f"{key}: {_plain(report[key])}" for key in LICENSE if isinstance(report.get(key), str)]
    front.append("---")
    name = repo.rpartition("/")[2]
    schemes = sorted({str(s) for s in checkpoint.schemes.values()})
    lines = [
        f"# {name}",
        "",
        f"{_plain(source or 'A model')}, quantized with lowq {_plain(report.get('lowq', ''))}".rstrip() + ".",
        "",
        "| | |",
        "|---|---|",
        f"| bits per weight, whole model | {checkpoint.bpw:.2f} |",
        f"| size of the weights | {size(checkpoint.nbytes)}{_before(report)} |",
        f"| share of weights quantized | {checkpoint.quantized_fraction:.1%} |",
        f"| schemes | {', '.join(schemes)} |",
        *_recipe(report),
        *_measured(measured),
        "",
        "## Use",
        "",
        "```sh",
        f'lowq generate {repo} --prompt "Hello"',
        "```",
        "",
        "```python",
        "import lowq  # makes transformers know the format",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repo}", device_map="auto")',
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        "```",
        "",
        *_engines(checkpoint, repo),
    ]
    return "\n".join([*front, "", *lines]).rstrip("\n") + "\n"


def _before(report: Mapping[str, Any]) -> str:
    before = report.get("source_bytes")
    return f" (before: {size(before)})" if isinstance(before, int) else ""


def _recipe(report: Mapping[str, Any]) -> list[str]:
    recipe = report.get("recipe")
    methods = sorted({t["method"] for t in report.get("tensors", ()) if t.get("method")})
    if not isinstance(recipe, Mapping):
        return []
    plain = {k: _counted(v) if isinstance(v, list) else v for k, v in recipe.items()}
    settings = ", ".join(f"{k} {v}" for k, v in plain.items() if v not in (None, "", "auto", "source"))
    return [f"| recipe | {_plain(settings)} |", f"| method | {_plain(', '.join(methods))} |"]


def _counted(values: list[Any]) -> str:
    """A short list in full; for many overrides, the number of names per width."""
    if len(values) <= FEW:
        return " ".join(map(str, values))
    widths = Counter(str(v).rpartition("=")[2] for v in values if "=" in str(v))
    if widths.total() < len(values):
        return f"of {len(values)} names"
    return f"of {len(values)} names (" + ", ".join(f"{n} in {bits}" for bits, n in widths.most_common()) + " bits)"


def _plain(text: object) -> str:
    """A report's text made safe for a line of the card: without newlines, markup or table cells."""
    return re.sub(r"([\\`\[\]<>|])", r"\\\1", " ".join(visible(str(text)).split()))


def _measured(measured: Mapping[str, Any] | None) -> list[str]:
    if not measured or measured.get("base_ppl") is None:
        return []
    change = 100 * (measured["ppl"] / measured["base_ppl"] - 1)
    return [
        f"| perplexity ({measured['tokens']} tokens, windows of {measured['window']}) | {measured['ppl']:.3f}, "
        f"{change:+.2f}% of {measured['base_ppl']:.3f} |",
        f"| KL divergence, nats per token | {measured['kl']:.4f} |",
    ]


def _engines(checkpoint: Checkpoint, repo: str) -> list[str]:
    every = list(commands(checkpoint).values())
    lines, name = [], repo.rpartition("/")[2]
    for text, some in (
        ("For other engines, the same weights bit for bit:", [c for c in every if "--round" not in c]),
        ("With -zero * scale rounded to 16 bits:", [c for c in every if "--round" in c]),
    ):
        if some:
            fetch = f"hf download {repo} --local-dir {name}"
            lines += [text, "", "```sh", fetch, *(f"lowq export {name} {command}" for command in some), "```", ""]
    return lines
