"""Small random draft heads in folders as their publishers write them, each with a small random model that it guesses for."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
from described import model as random_model

H, INNER, HEADS, KV, D, VOCAB, GUESSES, EPS, THETA = 64, 96, 4, 2, 16, 160, 48, 0.02, 5000.0
LAYERS = 6  # of the target: more than taps, so that each names another layer
FLAT = {
    "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "rms_norm_eps": EPS, "vocab_size": VOCAB, "hidden_act": "silu",
    "max_position_embeddings": 256, "attention_bias": False, "rope_theta": THETA,
}  # fmt: skip


def drawn(shapes, seed=3):
    """Tensors in bf16's values: those of one dimension around 1."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g)
        made[name] = (1 + 0.3 * x if len(shape) == 1 else x * 1.5 * shape[-1] ** -0.5).bfloat16().float()
    return made


def eagle3_tensors(layer="midlayer", guesses=GUESSES, taps=3, qk_norm=False, width=H):
    """An EAGLE-3 head's tensors as SafeAILab and SpecForge name them; `layer` "layers.0" for speculators."""
    shapes = {"fc.weight": (width, taps * H)} | {f"{layer}.{n}.weight": (width,) for n in ("input_layernorm", "hidden_norm")}
    shapes |= {f"{layer}.self_attn.{n}_proj.weight": (h * D, 2 * width) for n, h in (("q", HEADS), ("k", KV), ("v", KV))}
    shapes |= {f"{layer}.self_attn.o_proj.weight": (width, HEADS * D), f"{layer}.post_attention_layernorm.weight": (width,)}
    shapes |= {f"{layer}.mlp.{n}_proj.weight": (INNER, width) for n in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (width, INNER), "norm.weight": (width,), "lm_head.weight": (guesses, width)}
    if qk_norm:
        shapes |= {f"{layer}.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    made = drawn(shapes)
    if guesses != VOCAB:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:guesses].sort().values
        made |= {"d2t": ids - torch.arange(guesses), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    return made


def peagle_tensors(layers=2):
    """A P-EAGLE head's: EAGLE-3's with further layers, its own embedding, and features of what is not known."""
    first, shapes = eagle3_tensors("layers.0"), {"mask_hidden": (1, 1, 3 * H), "embed_tokens.weight": (VOCAB, H)}
    for i in range(1, layers):
        for name, t in first.items():
            if name.startswith("layers.0.") and "hidden_norm" not in name:
                rows, *columns = t.shape
                shapes[name.replace("layers.0", f"layers.{i}")] = (rows, *(H if n == 2 * H else n for n in columns))
    return first | drawn(shapes, 21)


def block_tensors(layers=2, taps=3, guesses=0, markov="", rank=8, embed=False, vector=False):
    """DFlash's and DSpark's: Qwen 3 layers, a product and a norm of the features, a last norm; what else each has."""
    shapes = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(layers):
        p = f"layers.{i}."
        shapes |= {f"{p}{n}.weight": (H,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{p}self_attn.{n}_proj.weight": (h * D, H) for n, h in (("q", HEADS), ("k", KV), ("v", KV))}
        shapes |= {f"{p}self_attn.{n}_norm.weight": (D,) for n in "qk"} | {f"{p}self_attn.o_proj.weight": (H, HEADS * D)}
        shapes |= {f"{p}mlp.{n}_proj.weight": (INNER, H) for n in ("gate", "up")} | {f"{p}mlp.down_proj.weight": (H, INNER)}
    if guesses or embed:
        shapes["lm_head.weight"] = (guesses or VOCAB, H)
    if embed:
        shapes["embed_tokens.weight"] = (VOCAB, H)
    if vector:
        shapes["mask_embedding"] = (H,)
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (guesses or VOCAB, rank)}
    if markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, H + rank), "markov_head.gate_proj.bias": (rank,)}
    if markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + H), "markov_head.joint_proj.bias": (3 * rank,)}
    made = drawn(shapes, 31)
    if markov:  # a correction that decides
        made["markov_head.markov_w1.weight"] *= 3
        made |= drawn({"confidence_head.proj.weight": (1, H + rank), "confidence_head.proj.bias": (1,)})
    if guesses:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:guesses].sort().values
        made |= {"d2t": ids - torch.arange(guesses), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    return made


def written(folder, config, tensors):
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def specforge(folder, tensors, **more):
    """SafeAILab's and SpecForge's: a flat config; in the files of the former names may begin with `model.`."""
    guesses = tensors["lm_head.weight"].shape[0]
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **FLAT, "draft_vocab_size": guesses, **more}
    return written(folder, config, tensors)


def speculators(folder, tensors, inside=(), **more):
    """Red Hat's."""
    layer = {"model_type": "llama", **FLAT, **dict(inside)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    own = {"algorithm": "eagle3", "proposal_methods": [proposal], "default_proposal_method": "greedy"}
    own["verifier"] = {"name_or_path": "somebody/model", "architectures": ["LlamaForCausalLM"]}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "transformer_layer_config": layer, "speculators_config": own, "tie_word_embeddings": False,
        "draft_vocab_size": tensors["lm_head.weight"].shape[0], "norm_before_residual": True, **more,
    }  # fmt: skip
    return written(folder, config, tensors)


def target(folder, name="llama", **more):
    """A random model's folder, in fp32, and the transformers model."""
    made = random_model(name, **({"num_hidden_layers": LAYERS} if name == "llama" else {}), **more)
    made.save_pretrained(folder)
    if name == "mimo":  # which transformers has by another name
        config = json.loads((folder / "config.json").read_text())
        own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config | own))
    return made


def other(t):
    """Values of a layer that is not the one it was copied from, whatever the shape that files give them."""
    return t * 0.8 + 0.02


def qwen_mtp(tensors):
    """Qwen 3.5's own: a layer of full attention below mtp., two norms, a product and a last norm."""
    layer = {"mtp.layers.0." + n.partition("layers.3.")[2]: other(t) for n, t in tensors.items() if "layers.3." in n}
    own = {"mtp.fc.weight": (H, 2 * H)} | {
        f"mtp.{n}.weight": (H,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    return layer | drawn(own)


def mimo_mtp(tensors):
    """MiMo's own: a layer below model.mtp_layers.0, two norms, a product that takes the hidden state first, a last norm."""
    p = "model.mtp_layers.0."
    layer = {p + n.partition("layers.3.")[2]: other(t) for n, t in tensors.items() if "layers.3." in n}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return layer | drawn({f"{p}input_proj.weight": (H, 2 * H)} | {f"{p}{n}.weight": (H,) for n in norms})


def nextn(tensors, n):
    """DeepSeek's and GLM's own: layer n, a copy of the embedding and of the head, three norms and a product."""
    last = {k.replace(f"layers.{n - 1}.", f"layers.{n}."): other(t) for k, t in tensors.items() if f"layers.{n - 1}." in k}
    p = f"model.layers.{n}."
    own = {f"{p}eh_proj.weight": (H, 2 * H)} | {f"{p}{k}.weight": (H,) for k in ("enorm", "hnorm", "shared_head.norm")}
    copies = {f"{p}embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    return last | drawn(own) | copies | {f"{p}shared_head.head.weight": tensors["lm_head.weight"]}


def with_heads(folder, make, *given):
    """Put a model's own MTP layers into its folder; all tensors."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {n: t.contiguous().clone() for n, t in make(tensors, *given).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors
