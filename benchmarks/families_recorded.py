"""How families decode on a GPU: benchmarks/results/<gpu>/families_recorded.json, a row {family, decoder, reason}.

    python benchmarks/families_recorded.py [FAMILY ...]

A tiny model of each, with random weights, in 8 bits: native, hf_graph (transformers' own forward, recorded as a graph that was
checked against its steps), or plain, and then why.
"""

import json
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
import transformers
from pages import results_of

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.run.pipeline import quantize

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "families"))
from family_judge import IDS
from tiny import build

NAMED = (
    *("gpt_oss", "llama4_text", "granitemoe", "jetmoe", "aria_text", "falcon", "nemotron_h", "deepseek_v2", "deepseek_v3"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "qwen2_moe", "olmoe", "glm4_moe", "bamba", "jamba"),
)
NEW = 8


def row(family: str, device: str) -> dict[str, str | float]:
    """How one family decodes."""
    with tempfile.TemporaryDirectory() as folder:
        build(family).save_pretrained(f"{folder}/dense")
        quantize(f"{folder}/dense", f"{folder}/packed", bits=8, group=16, method="rtn", device="cpu")
        with open_source(f"{folder}/packed") as source:
            model = load_model(source, device, torch.bfloat16)
    decoder = decoder_of(model)
    decoder.start(IDS.tolist(), Sampling(), NEW)
    for _ in range(NEW - 1):
        decoder.step()
    recorded = decoder.name == "native" or bool(getattr(decoder, "run", None))
    return {"family": family, "decoder": decoder.name, "recorded": recorded, "reason": decoder.reason}


def main() -> None:
    """A row a family; what fails says why."""
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for family in sys.argv[1:] or NAMED:
        try:
            rows.append(row(family, device))
        except Exception as e:  # one that this transformers does not have, or cannot build
            rows.append({"family": family, "decoder": "none", "reason": f"{type(e).__name__}: {e}"[:300]})
        print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {"device": name, "date": str(date.today()), "transformers": transformers.__version__, "torch": torch.__version__}
    (results_of(name) / "families_recorded.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
