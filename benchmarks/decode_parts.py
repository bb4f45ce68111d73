"""What each kind of kernel adds to a decode step: the step with it, and with it left out.

    python benchmarks/decode_parts.py --out FILE.json [--model 8b] [--variants 4,2h8] [--positions 128,384,640]

Kernels overlap (programmatic dependent launch), so the sum of their own times is not the step's. Here an operation is replaced
by a view of its input and the recorded step is timed again; the difference is what it costs in place. Results are rubbish then.
"""

import argparse
import gc
import json
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from e2e_decode import decoder_for

from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.search import step_us
from lowq_kernels.decode import attention

ROOM = 800


def without(decoder: Any) -> dict[str, dict[str, Any]]:
    """Operations of the decoder's set that stand in for the real ones, by what is left out of a step that folds nothing."""
    heads = decoder.blocks.layers[0].heads
    attend = {"attend": lambda qkv, *rest: qkv[:, : heads.HQ * heads.D]}
    gated = {"gated": lambda gate_up, act: gate_up[:, : gate_up.shape[1] // 2]}
    norm = {"add_norm": lambda x, delta, *rest: x if delta is None else delta}
    choose = {"choose": lambda *rest: None}
    return {
        "folding": {},
        "attention": attend,
        "SwiGLU": gated,
        "norms": norm,
        "the choice of a token": choose,
        "all but products": attend | gated | norm | choose,
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--variants", default="4,2h8")
    parser.add_argument("--positions", default="128,384,640")
    args = parser.parse_args()
    facts = {"device": torch.cuda.get_device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    result: dict[str, Any] = {**facts, "torch": version("torch"), "model": args.model, "rows": []}
    for variant in args.variants.split(","):
        _, decoder = decoder_for(variant, args.model, torch.float16, "cuda")
        decoder.start([[5] * 128], Sampling(), ROOM)
        whole = decoder.ops
        with torch.inference_mode():
            for position in map(int, args.positions.split(",")):
                decoder.pos.fill_(position)
                cases = {"nothing": {}, "attend.cu, Triton's instead": {"attend": attention.attend}}
                cases |= {name: others | {"fold": None} for name, others in without(decoder).items()}
                for left_out, others in cases.items():
                    decoder.ops = replace(whole, **others)
                    us = round(step_us(decoder), 1)
                    result["rows"].append({"variant": variant, "position": position, "without": left_out, "us": us})
                    print(result["rows"][-1], flush=True)
                decoder.ops = whole
        del decoder
        gc.collect()
        torch.cuda.empty_cache()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
