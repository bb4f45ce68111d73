"""Train a small mixture and a small hybrid for kinds.py: what a model holds besides plain attention and MLPs.

    python benchmarks/kinds_models.py FOLDER --model MODELS/story --data DATA [--seconds 120] [--own-tokens 65536]

The mixture is MODEL upcycled to a Mixtral: attention, norms and embedding are copied; each of 8 experts, 2 a token, is a copy
of the MLP with half of its channels drawn anew. Nothing balances its router, so some experts are visited seldom. The hybrid is
a Qwen 3.5 of MODEL's width: three layers of gated delta and one of attention, and MODEL's embedding. Both read
mix_calib_sample.txt and a text that MODEL wrote itself, never the texts that kinds.py evaluates on, and are written to
FOLDER/mixture and FOLDER/hybrid.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accuracy_rows import device
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lowq_cli.calibrate import texts
from lowq_cli.files.source import open_source
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import own_text, own_text_plan

LENGTH, RATE, PASSES = 128, 2e-3, 4  # tokens of a sequence; the largest learning rate; most passes over the text
SEQUENCES = {"cpu": 4, "cuda": 64}  # of a step
EXPERTS, CHOSEN, DRAWN = 8, 2, 0.5  # experts, those of a token, share of an expert's channels that are drawn anew
LINEAR, FULL = "linear_attention", "full_attention"


def mixture(dense: Any) -> Any:
    """A Llama upcycled to a Mixtral."""
    c, draw = dense.config, torch.Generator().manual_seed(0)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "bos_token_id")
    sizes = {name: getattr(c, name) for name in (*same, *more, "eos_token_id", "pad_token_id")}
    routing = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "sliding_window": None}
    config = AutoConfig.for_model("mixtral", **sizes, **routing)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dense.state_dict(), strict=False)
    for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
        gate_up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight]).detach()
        down, inner = old.mlp.down_proj.weight.detach(), c.intermediate_size
        experts = layer.mlp.experts
        for e in range(EXPERTS):
            first, second = gate_up.clone(), down.clone()
            new = torch.randperm(inner, generator=draw)[: int(DRAWN * inner)]
            for rows in (new, inner + new):
                first[rows] = torch.randn(len(new), c.hidden_size, generator=draw) * gate_up[rows].std()
            second[:, new] = torch.randn(c.hidden_size, len(new), generator=draw) * down[:, new].std()
            experts.gate_up_proj.data[e], experts.down_proj.data[e] = first, second
        layer.mlp.gate.weight.data.normal_(0, c.hidden_size**-0.5, generator=draw)
    return model


def hybrid(dense: Any) -> Any:
    """A Qwen 3.5 of a Llama's width and embedding, otherwise of random weights."""
    c = dense.config
    torch.manual_seed(0)
    heads, H = c.num_attention_heads, c.hidden_size
    dim = H // heads
    sizes = {"vocab_size": c.vocab_size, "hidden_size": H, "intermediate_size": c.intermediate_size, "num_hidden_layers": 4}
    full = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": dim}
    linear = {"linear_num_key_heads": heads // 2, "linear_num_value_heads": heads}
    linear |= {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    same = {n: getattr(c, n) for n in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    layers = {"layer_types": [LINEAR] * 3 + [FULL], "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **full, **linear, **same, **layers)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data.copy_(dense.get_input_embeddings().weight)
    return model


def train(model: Any, ids: torch.Tensor, seconds: float, on: str, length: int = LENGTH) -> dict[str, Any]:
    """Train a model in place on windows of ids (n,) of `length` tokens, fewer at once where they are longer; returns the facts
    of the run. seconds: of this process, on a CPU."""
    clock = time.process_time if on == "cpu" else time.monotonic
    torch.manual_seed(0)
    model.to(on).train()
    count, losses, began = SEQUENCES[on] * LENGTH // length, list[float](), clock()
    most = PASSES * len(ids) // (count * length)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(most):
        share = max((clock() - began) / seconds, step / most)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 10, 1 - share)
        at = torch.randint(0, len(ids) - length, (count,))
        windows = torch.stack([ids[i : i + length] for i in at.tolist()]).to(on)
        loss = model(windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 20 == 0:
            print(f"step {step} of at most {most}: {losses[-1]:.2f} nats a token", flush=True)
    last = losses[-10:]
    return {
        "seconds": round(clock() - began, 1), "steps": len(losses), "tokens": len(losses) * count * length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss_before": round(losses[0], 3), "loss_after": round(sum(last) / len(last), 3),
    }  # fmt: skip


def text_of(folder: Path, data: Path, tokens: int) -> torch.Tensor:
    """Token ids (n,): the calibration mix, then what the model writes itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    mix = texts.tokenize(tokenizer, (data / "mix_calib_sample.txt").read_text())
    with open_source(str(folder)) as source:
        recipe = make_recipe(method="gptq", calib=texts.SELF, calib_tokens=tokens)
        own = own_text.whole(own_text_plan.outlook(str(folder), source, recipe, torch.device(device())), None)
    assert own.ids is not None
    return torch.cat([mix, own.ids.long()])


def training_parser(about: str | None, seconds: float) -> argparse.ArgumentParser:
    """The flags of a script that trains small models: their folder, the model they are made of, texts, seconds for each."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=seconds, help="for training each model")
    parser.add_argument("--own-tokens", type=int, default=65536, help="of the text that MODEL writes, which is trained on, too")
    return parser


def main() -> None:
    """Train both and write their folders, with the facts in FOLDER/trained.json."""
    args = training_parser(__doc__, seconds=120).parse_args()
    dense = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ids, facts = text_of(args.model, args.data, args.own_tokens), {}
    for name, make in (("mixture", mixture), ("hybrid", hybrid)):
        model = make(dense)
        facts[name] = train(model, ids, args.seconds, device())
        print(name, facts[name], flush=True)
        model.to("cpu", torch.bfloat16).save_pretrained(args.folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.model / file, args.folder / name / file)
    (args.folder / "trained.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
