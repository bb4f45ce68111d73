"""Measure a draft head on the shape of a large model, at given acceptance. benchmarks/results/<device>/draft_rounds.json.

    python benchmarks/draft_rounds.py [--model 8b] [--variant 4h8] [--rows 4,6,8] [--lengths 2,3,3.5,4,5] [--bits 4]

Model and head have random weights, so nothing that the head guesses is right. What counts the right drafts is therefore
replaced by a stand-in that accepts as many as give the wanted mean of tokens a round. All else is the real thing, recorded: the
head (an EAGLE-3 head of one layer and 32,000 tokens, quantized by `lowq quantize`), the step that checks its guesses, and the
host one step behind. `--model` is a shape of e2e_decode.py, or a published model of families_speed.py, as whole:qwen3_5.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from drafts import Row
from e2e_decode import decoder_for
from families_speed import model_of
from pages import results_of
from safetensors.torch import save_file

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.drafts import heads
from lowq_cli.engine.precompiling import launches
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.stream import Fetch
from lowq_kernels.dispatch.precompile import launch_all

CONTEXT, ROUNDS, GUESSES = 512, 80, 32000
CYCLE = 20  # rounds after which the numbers of accepted drafts repeat


def head_files(folder: Path, c: Any) -> None:
    """Write an EAGLE-3 head of random weights for a model of config c, as SafeAILab does."""
    H, inner, D = c.hidden_size, c.intermediate_size, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv = c.num_attention_heads * D, c.num_key_value_heads * D
    shapes = {"fc.weight": (H, 3 * H), "lm_head.weight": (GUESSES, H), "norm.weight": (H,)}
    shapes |= {f"midlayer.{n}.weight": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"midlayer.self_attn.{n}_proj.weight": (w, 2 * H) for n, w in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {"midlayer.self_attn.o_proj.weight": (H, q), "midlayer.mlp.down_proj.weight": (H, inner)}
    shapes |= {f"midlayer.mlp.{n}_proj.weight": (inner, H) for n in ("gate", "up")}
    weights = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * s[-1] ** -0.5 for n, s in shapes.items()}
    tensors = {n: t.bfloat16() for n, t in weights.items()}
    tensors["d2t"] = torch.zeros(GUESSES, dtype=torch.int64)
    tensors["t2d"] = torch.arange(c.vocab_size) < GUESSES
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": inner}
    config |= {"num_hidden_layers": 1, "num_attention_heads": c.num_attention_heads, "head_dim": D, "hidden_act": "silu"}
    config |= {"num_key_value_heads": c.num_key_value_heads, "rms_norm_eps": 1e-6, "vocab_size": c.vocab_size}
    config |= {"draft_vocab_size": GUESSES, "max_position_embeddings": 4096, "rope_theta": 10000.0, "attention_bias": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def head_for(model: Any, bits: int) -> heads.HeadDrafter:
    """A head in so many bits."""
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "head", Path(folder) / "packed"
        head_files(plain, model.config)
        if bits < 16:
            command = ["lowq", "quantize", str(plain), "--bits", str(bits), "--out", str(packed)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return heads.load(str(packed if bits < 16 else plain), model)


class Accepting:
    """The stand-in for `Ops.accept`: accepts as many drafts as make `length` tokens a round in the mean."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(CYCLE, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    def set(self, length: float) -> None:
        """Accept so many tokens a round from now on."""
        ends = [round((length - 1) * i) for i in range(CYCLE + 1)]
        self.counts.copy_(torch.tensor([b - a for a, b in pairwise(ends)]))

    def __call__(self, drawn: torch.Tensor, *rest: torch.Tensor) -> None:
        """As `reference.accept`."""
        *_, token, pos, accepted = rest
        right = self.counts.index_select(0, self.turn % CYCLE)
        accepted.copy_(right)
        token.copy_(drawn.index_select(0, right))
        pos.add_((right + 1).int())
        self.turn.add_(1)


@contextmanager
def accepting(decoder: Any) -> Iterator[Accepting]:
    """Inside, the decoder's steps accept what the stand-in says."""
    before, stand_in = decoder.plan.ops, Accepting(decoder.device)
    decoder.plan.ops = replace(before, accept=stand_in)
    decoder.wide.clear()
    yield stand_in
    decoder.plan.ops = before
    decoder.wide.clear()


def plain(decoder: Any, ids: list[int]) -> float:
    """Tokens per second of plain steps."""
    decoder.start([ids], Sampling(), 2 * ROUNDS)
    for _ in range(5):
        decoder.step()
    decoder.token.tolist()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        decoder.step()
    decoder.token.tolist()
    return ROUNDS / (time.perf_counter() - began)


def rounds(decoder: Any, ids: list[int], T: int) -> tuple[float, int]:
    """(seconds, tokens) of ROUNDS rounds of T rows."""
    decoder.start([ids], Sampling(), (ROUNDS + 10) * T)
    waiting, tokens, began = [], 0, 0.0
    for i in range(ROUNDS + 6):
        waiting.append(Fetch(decoder.verify((), T).result))
        if i < 6:
            began = time.perf_counter()
            waiting[-1].get()
            waiting.clear()
        elif len(waiting) > 1:
            tokens += waiting.pop(0).get()[0] + 1
    tokens += waiting.pop().get()[0] + 1
    return time.perf_counter() - began, tokens


def measured(
    name: str, variant: str, bits: int, row_counts: list[int], lengths: list[float], device: str = "cuda"
) -> Iterator[Row]:
    """A row for each number of rows and each length."""
    decoder: Any  # NativeDecoder, by its plan and drafts
    if name.startswith("whole:"):
        model = model_of(name, device, torch.float16, variant)
        decoder = decoder_of(model)
    else:
        model, decoder = decoder_for(variant, name, torch.float16, device)
    about = {"model": name, "variant": variant, "head_bits": bits}
    ids = torch.randint(3, decoder.plan.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = head_for(model, bits)
    decoder.drafts, decoder.held = True, []
    launch_all(launches(model, decoder, 1, CONTEXT, Sampling()), lambda n, of: None)
    without = plain(decoder, ids)
    yield about | {"tokens_per_s_without": round(without, 1)}
    decoder.attach(drafter)
    yield about | {"tokens_per_s_without": round(plain(decoder, ids), 1), "head": "attached, idle"}
    with accepting(decoder) as stand_in:
        for T in row_counts:
            for length in (one for one in lengths if one <= T):
                stand_in.set(length)
                rounds(decoder, ids, T) if length == lengths[0] else None
                seconds, tokens = min(rounds(decoder, ids, T) for _ in range(2))
                row = about | {"rows": T, "tokens_per_round": round(tokens / ROUNDS, 3), "reason": decoder.reason}
                row |= {"ms_per_round": round(1e3 * seconds / ROUNDS, 4), "tokens_per_s": round(tokens / seconds, 1)}
                yield row | {"times": round(tokens / seconds / without, 3)}


@torch.inference_mode()
def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--variant", default="4h8")
    parser.add_argument("--bits", type=int, default=4, help="of the head")
    parser.add_argument("--rows", default="4,6,8")
    parser.add_argument("--lengths", default="2,3,3.3,3.5,4,5")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name, rows_measured = torch.cuda.get_device_name(), list[Row]()
    out = args.out or results_of(name) / "draft_rounds.json"
    about = {"device": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__}
    lengths, row_counts = list(map(float, args.lengths.split(","))), list(map(int, args.rows.split(",")))
    for row in measured(args.model, args.variant, args.bits, row_counts, lengths):
        print(row, flush=True)
        rows_measured.append(row)
        out.write_text(json.dumps(about | {"rows": rows_measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
