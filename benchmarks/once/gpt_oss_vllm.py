"""Time gpt-oss' shape with random weights in vLLM with vLLM's kernels, to compare with rows of e2e_decode.py of the same run.

    python benchmarks/once/gpt_oss_vllm.py --out FILE.json [--model gpt-oss-20b] [--batches 1,16,64]

The result lies in results/<gpu>/decode_gpt-oss-20b_vllm.json.

Experts in MXFP4 as published, the rest in bf16. A row is tokens/s of all texts over the new tokens after the first, as in
e2e_decode.py: the median time of the whole answers less that of one token. No checkpoint is written: vLLM makes dummy weights,
and these are given the spread of trained ones here, so that tokens go to as many experts as there.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
from e2e_decode import SHAPES
from transformers import AutoConfig

from lowq_cli.interop import vllm_speed

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def folder_of(shape: str, out: Path) -> Path:
    """A folder with nothing but the config of a published model of that shape."""
    facts = SHAPES[shape] | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = json.loads(AutoConfig.for_model(**facts).to_json_string()) | {"architectures": ["GptOssForCausalLM"]}
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}}
    (out / "config.json").write_text(json.dumps(config))
    return out


def spread(model: torch.nn.Module, *_: Any) -> None:
    """`filled` all tensors, in the place of vLLM's dummy values."""
    for name, param in model.state_dict().items():
        filled(name, param)


def filled(name: str, param: torch.Tensor) -> None:
    """Random codes, scales of about 1 / sqrt(K), matrices of that spread, biases 0 (e2e_decode.fill says why), others 1."""
    if name.endswith("bias"):
        param.zero_()
    elif param.dtype == torch.uint8:  # (E, N, K / 2) codes, (E, N, K / 32) exponents
        K = int(param.shape[-1]) * 2 if param.shape[-1] > 512 else int(param.shape[-1]) * 32
        about = 127 - round(K.bit_length() / 2) - 2  # e2m1's own spread is about 2^1.5
        param.random_(0, 256) if param.shape[-1] * 2 == K else param.random_(about, about + 2)
    elif torch.is_floating_point(param):
        param.fill_(1) if param.dim() < 2 else param.normal_(0, param.shape[-1] ** -0.5)


def main() -> None:
    """Start the engine, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="gpt-oss-20b", choices=[name for name in SHAPES if "gpt-oss" in name])
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    for key, value in vllm_speed.ENGINE.items():
        os.environ.setdefault(key, value)
    from vllm.model_executor.model_loader import dummy_loader  # type: ignore[import-not-found]

    dummy_loader.initialize_dummy_weights = spread
    batches, rows = [int(b) for b in args.batches.split(",")], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        more = {"max_num_seqs": max(batches), "max_model_len": args.prompt + args.new + 8, "gpu_memory_utilization": 0.6}
        captured = sorted({1, 2, 4, *range(8, max(batches) + 1, 8)})
        made = folder_of(args.model, Path(folder))
        llm, facts = vllm_speed.start(made, load_format="dummy", cudagraph_capture_sizes=captured, **more)
        for batch in batches:
            whole, first = (statistics.median(vllm_speed.timed(llm, batch, args.prompt, n, 2)) for n in (args.new, 1))
            tps = batch * (args.new - 1) / (whole - first)
            rows.append({"variant": "vllm", "model": args.model, "batch": batch, "dtype": "bfloat16", "tokens_per_s": tps})
            print(rows[-1], flush=True)
    stamp = {"device": torch.cuda.get_device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
    args.out.write_text(json.dumps(facts | {"prompt": args.prompt, "new": args.new} | stamp, indent=1) + "\n")


if __name__ == "__main__":
    main()
