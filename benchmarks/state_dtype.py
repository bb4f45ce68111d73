"""Measure what a recurrent state in bf16 instead of fp32 changes in a model's predictions. Runs on a CPU.

    python benchmarks/state_dtype.py FOLDER --model MODELS/story --data DATA [--seconds 150] [--windows 32] [--out FILE]

Two small hybrids of six layers with MODEL's embedding, MLPs and, as far as they fit, projections of attention, kept in FOLDER:
a Qwen 3.5 with four gated delta nets and a Granite 4 with four Mamba2 layers, trained as kinds_models.py trains its own. Then
lowq's decoder reads windows of mix_valid_sample.txt token by token, weights and activations in fp32: with its state in fp32,
with a state that is rounded to bf16 after every token, and without a state, which shows what it is worth. In a row, the
perplexities, and in nats a token the KL divergence from the first: of all tokens, and of the last quarter of the windows,
before which the state was rounded most often.

Such models remember little. `decays`: the relative error of the outputs of the last quarter of 8,192 random tokens with a state
that is rounded, by the factor that a token leaves of the state. Another call with the same --out replaces the rows it measures.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accuracy_rows import words
from kinds_models import text_of, train, training_parser
from pages import results_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lowq_cli.engine.batch import States
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.sampling import Sampling
from lowq_cli.evaluate import perplexity

TEXT, LENGTH, TRAINED = "mix_valid_sample.txt", 1024, 256  # tokens of a window, and of one in training
RECURRENT = (0, 1, 3, 4)  # of six layers
HEAD, STATE = 64, 64  # Mamba2: channels of a head; values of state per channel
TOKENS, DECAYS = 8192, (0.9, 0.99, 0.999, 0.9999, 1.0)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SAME = (*SIZES, "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rms_norm_eps")


@torch.no_grad()
def made(dense: Any, kind: str, **fields: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """A model of a Llama's sizes, embedding and last norm, otherwise random, and its layers next to the Llama's."""
    torch.manual_seed(0)
    sizes = {name: getattr(dense.config, name) for name in SAME} | {"tie_word_embeddings": True}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | fields))
    model.get_input_embeddings().weight.copy_(dense.get_input_embeddings().weight)
    return model, list(zip(model.model.layers, dense.model.layers, strict=True))


@torch.no_grad()
def gated_delta(dense: Any) -> Any:
    """A Qwen 3.5, whose attention has a gate of each value (0.5 at first) and whose norms multiply by 1 + weight."""
    heads, kv = dense.config.num_attention_heads, dense.config.num_key_value_heads
    dim = dense.config.head_dim
    linear = {
        "linear_num_key_heads": kv,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
    }
    types = ["linear_attention" if i in RECURRENT else "full_attention" for i in range(dense.config.num_hidden_layers)]
    model, layers = made(dense, "qwen3_5_text", head_dim=dim, layer_types=types, **linear)
    model.model.norm.weight.copy_(dense.model.norm.weight - 1)
    for new, old in layers:
        new.mlp.load_state_dict(old.mlp.state_dict())
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(new, norm).weight.copy_(getattr(old, norm).weight - 1)
        q, k, v, o = (getattr(old.self_attn, f"{name}_proj").weight for name in "qkvo")
        q, wide_v = q.unflatten(0, (heads, dim)), v.unflatten(0, (kv, dim)).repeat_interleave(heads // kv, 0).flatten(0, 1)
        if hasattr(new, "linear_attn"):
            new.linear_attn.in_proj_qkv.weight.copy_(torch.cat([q[:: heads // kv].flatten(0, 1), k, wide_v]))
            new.linear_attn.out_proj.weight.copy_(o)
            continue
        new.self_attn.q_proj.weight.copy_(torch.cat([q, torch.zeros_like(q)], 1).flatten(0, 1))
        new.self_attn.k_proj.weight.copy_(k)
        new.self_attn.v_proj.weight.copy_(v)
        new.self_attn.o_proj.weight.copy_(2 * o)
    return model


@torch.no_grad()
def mamba2(dense: Any) -> Any:
    """A Granite 4 without experts, whose attention is the Llama's."""
    c = dense.config
    types = ["mamba" if i in RECURRENT else "attention" for i in range(c.num_hidden_layers)]
    mamba = {"mamba_n_heads": 2 * c.hidden_size // HEAD, "mamba_d_head": HEAD, "mamba_d_state": STATE, "mamba_chunk_size": HEAD}
    plain = {"attention_multiplier": c.head_dim**-0.5, "position_embedding_type": "rope", "num_local_experts": 0}
    plain |= {"shared_intermediate_size": c.intermediate_size, "rope_parameters": c.rope_parameters, "num_experts_per_tok": 0}
    model, layers = made(dense, "granitemoehybrid", layer_types=types, **mamba, **plain)
    model.model.norm.weight.copy_(dense.model.norm.weight)
    for new, old in layers:
        new.shared_mlp.input_linear.weight.copy_(torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight]))
        new.shared_mlp.output_linear.weight.copy_(old.mlp.down_proj.weight)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(new, norm).weight.copy_(getattr(old, norm).weight)
        if getattr(new, "self_attn", None) is not None:
            new.self_attn.load_state_dict(old.self_attn.state_dict())
    return model


MODELS = {"gated delta net": gated_delta, "Mamba2": mamba2}


def trained(folder: Path, args: argparse.Namespace) -> None:
    """Train the models that the folder lacks; a model's folder has the facts of the run in trained.json."""
    dense, ids = None, None
    for name, make in args.models.items():
        out = folder / make.__name__
        if (out / "trained.json").exists():
            continue
        dense = dense or AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        ids = text_of(args.model, args.data, args.own_tokens) if ids is None else ids
        model = make(dense)
        facts = train(model, ids, args.seconds, "cpu", TRAINED)
        print(name, facts, flush=True)
        model.save_pretrained(out)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.model / file, out / file)
        (out / "trained.json").write_text(json.dumps(facts) + "\n")


class Reader:
    """lowq's decoder over windows (B, T) of token ids: the next token is given, not drawn. change: of a state after a token."""

    def __init__(self, folder: Path, windows: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.decoder, self.windows, self.change = NativeDecoder(model.eval()), windows, change

    def read(self, t: int) -> torch.Tensor:
        """Log-probabilities (B, V) fp64 after token t, which is read; t counts up from 0."""
        decoder, ids = self.decoder, self.windows[:, t]
        if t == 0:
            decoder.start([[i] for i in ids.tolist()], Sampling(), self.windows.shape[1] + 1)
        else:
            decoder.token.copy_(ids)
            decoder.step()
        for one in decoder.state:
            if isinstance(one, States):  # the inputs of its convolution stay
                one.tensors["S"].copy_(self.change(one.tensors["S"]))
        return decoder.sampler.logits.double().log_softmax(-1)


STATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda state: state,
    "bf16": lambda state: state.bfloat16(),
    "none": lambda state: state.new_zeros(()),
}


@torch.inference_mode()
def row(folder: Path, windows: torch.Tensor) -> dict[str, Any]:
    """All readers over all windows, in step."""
    readers = {name: Reader(folder, windows, change) for name, change in STATES.items()}
    (B, T), last = windows.shape, slice(-(windows.shape[1] // 4), None)
    loss, kl = (torch.zeros(len(readers), T - 1, dtype=torch.float64) for _ in range(2))
    agree = torch.zeros(len(readers))
    for t in range(T - 1):
        predicted = [reader.read(t) for reader in readers.values()]
        for i, q in enumerate(predicted):
            loss[i, t] = -q.gather(1, windows[:, t + 1, None]).mean()
            kl[i, t] = (predicted[0].exp() * (predicted[0] - q)).sum(-1).mean()
            agree[i] += (predicted[0].argmax(-1) == q.argmax(-1)).sum()
        if t % 128 == 0:
            print(f"token {t}: {loss[:, : t + 1].mean(1).exp().tolist()}, kl {kl[:, : t + 1].mean(1).tolist()}", flush=True)
    rows = {
        name: {"ppl": round(float(loss[i].mean().exp()), 4), "last_ppl": round(float(loss[i, last].mean().exp()), 4)}
        | {"kl": float(f"{kl[i].mean():.3g}"), "last_kl": float(f"{kl[i, last].mean():.3g}")}
        | {"top1": round(float(agree[i]) / B / (T - 1), 5)}
        for i, name in enumerate(readers)
    }
    return {"tokens": B * T, "states": rows}


def remembered(decay: float, delta: bool, rounded: bool) -> torch.Tensor:
    """Outputs (TOKENS, heads, dim) of a recurrence over random inputs: a gated delta net of beta 0.5, or Mamba2's."""
    draw = torch.Generator().manual_seed(0)
    S, outputs = torch.zeros(4, STATE, HEAD), []
    for _ in range(TOKENS):
        k, q, v = (torch.randn(4, 1, n, generator=draw) for n in (STATE, STATE, HEAD))
        S = S * decay
        if delta:
            k, q = (x / x.norm(dim=-1, keepdim=True) for x in (k, q))
            v = 0.5 * (v - k @ S)
        S = S + k.transpose(1, 2) @ v
        S = S.bfloat16().float() if rounded else S
        outputs.append(q @ S)
    return torch.cat(outputs, 1)


def decays() -> dict[str, dict[str, float]]:
    """Mixer -> decay -> error."""
    found: dict[str, dict[str, float]] = {}
    for name, delta in (("gated delta net", True), ("Mamba2", False)):
        for decay in DECAYS:
            exact, other = (remembered(decay, delta, rounded)[:, -TOKENS // 4 :] for rounded in (False, True))
            found.setdefault(name, {})[str(decay)] = float(f"{(other - exact).norm() / exact.norm():.3g}")
    return found


def main() -> None:
    """Train what is missing, then a row a model."""
    parser = training_parser(__doc__, seconds=150)
    parser.add_argument("--windows", type=int, default=32, help=f"of {LENGTH} tokens; 0: train only")
    parser.add_argument("--only", type=words, default=[make.__name__ for make in MODELS.values()], help="models")
    parser.add_argument("--out", type=Path, default=results_of("cpu") / "state_dtype.json")
    args = parser.parse_args()
    args.models = {name: make for name, make in MODELS.items() if make.__name__ in args.only}
    trained(args.folder, args)
    if args.windows == 0:
        return
    report: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "text": TEXT, "length": LENGTH}
    report |= {"versions": {p: version(p) for p in ("lowq", "torch", "transformers")}, "decays": decays()}
    print(report["decays"], flush=True)
    rows = {r["mixer"]: r for r in json.loads(args.out.read_text())["rows"]} if args.out.exists() else {}
    for name, make in args.models.items():
        folder = args.folder / make.__name__
        ids = perplexity.tokenize(AutoTokenizer.from_pretrained(folder), (args.data / TEXT).read_text())
        windows = ids.flatten()[: args.windows * LENGTH].reshape(-1, LENGTH)
        facts = json.loads((folder / "trained.json").read_text())
        rows[name] = {"mixer": name, "trained": facts, **row(folder, windows)}
        print(rows[name], flush=True)
        args.out.write_text(json.dumps(report | {"rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
