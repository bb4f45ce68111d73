"""DFlash and DSpark heads: they draft a block of tokens at once, whose rows attend to each other and to the target's features.

The head's cache holds, for every token of the text, keys and values of the target's features. A block is the newest token,
followed by mask tokens. DSpark's drafts are one position earlier, and each is corrected by the previous one.
Source: the models and configs of z-lab/dflash, deepseek-ai/DeepSpec and vllm-project/speculators.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch.common import unless
from lowq_packers.arch.config import read_config
from lowq_packers.arch.names import part_tensors
from lowq_packers.arch.parts import Attention, Linear, Norm, Update
from lowq_packers.errors import DamagedError
from lowq_packers.heads.eagle3 import SIZES
from lowq_packers.heads.parts import MAPS, Block, Fuse, Head, Markov, Read, Shapes, Target, check_tensors

RENAMED = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
IGNORED = ("t2d", "verifier_", "confidence_head.", "rotary_emb.")  # used in training, or an estimate that drafts do not need
W1, W2, GATE, JOINT = (f"markov_head.{n}" for n in ("markov_w1", "markov_w2", "gate_proj", "joint_proj"))


def read(config: Mapping[str, Any], shapes: Shapes, target: Target, kind: str) -> Read:
    """The head of a folder's config.json and tensors. kind: "DFlash" or "DSpark"."""
    files = {_plain(name): name for name in shapes}
    shapes = {name: shapes[whole] for name, whole in files.items()}
    speculators, inner = "speculators_model_type" in config, config.get("dflash_config") or {}
    inside = dict(config.get("transformer_layer_config") or {}) if speculators else dict(config)
    count = len({n.split(".")[1] for n in shapes if n.startswith("layers.")})
    fields = {**config, **inner}
    odd = [n for n in ("attention_sink_bias", "use_swa") if fields.get(n)]
    unless(odd, f"its config.json has {', '.join(odd)}")
    unless("sliding_attention" in (inside.get("layer_types") or ()), "some of its layers have sliding-window attention")
    unless(fields.get("is_neox_style") is False, "its rotary embedding pairs neighbouring values")
    unless(
        fields.get("projector_type", kind.lower()) not in ("dflash", "dspark"),
        f"its projector is {fields.get('projector_type')}",
    )
    unless(target.model.embed_scale != 1.0, "the model multiplies its embeddings")
    inside = {"model_type": "qwen3", **inside, "num_hidden_layers": max(count, 1)}
    inside = {**SIZES.get(inside["model_type"], {}), **inside} if speculators else inside
    inside.setdefault("vocab_size", target.model.vocab)
    for name in ("layer_types", "sliding_window", "use_sliding_window"):
        inside.pop(name, None)
    c, model, _ = read_config(inside)
    H, wide = c.hidden_size, target.model.hidden
    unless(wide != H, f"its hidden states have {H} values, the model's {wide}")
    unless(c.vocab_size != target.model.vocab, f"it is for a vocabulary of {c.vocab_size}, the model has {target.model.vocab}")
    taps = _taps(fields, speculators, target)
    rows = shapes.get("d2t") or shapes.get("lm_head.weight") or (c.vocab_size,)
    layers = tuple(_whole(layer) for layer in model.layers)
    fuse = Fuse(Linear(("fc",), (H,), len(taps) * wide), (), Norm("hidden_norm", H, float(c.rms_norm_eps)))
    decoder = replace(
        model, layers=layers, vocab=rows[0], prefix="", files=(), extra=(), outside_text=(), renamed=(), tied=False
    )
    block = _block(fields, kind, shapes, c.vocab_size, rows[0], H)
    own_head, own_embed = "lm_head.weight" in shapes, "embed_tokens.weight" in shapes
    head = Head(kind, decoder, taps, fuse, "stream", own_embed, own_head, "d2t" in shapes, block=block)
    if rows[0] != c.vocab_size and not head.mapped:
        raise DamagedError(
            f"the draft head chooses among {rows[0]} of {c.vocab_size} tokens, but d2t, the list of these tokens, is missing"
        )
    check_tensors(_tensors(head, c.vocab_size), shapes, IGNORED)
    return Read(head, c, files)


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    stem, _, leaf = name.rpartition(".")
    return f"{RENAMED[stem]}.{leaf}" if stem in RENAMED else name


def _taps(section: Mapping[str, Any], speculators: bool, target: Target) -> tuple[int, ...]:
    """The layers whose inputs are read. speculators counts layers by their inputs, the other writers by their outputs."""
    given = section.get("aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    if not isinstance(given, list | tuple) or not given or any(type(i) is not int for i in given):
        raise DamagedError("config.json of the draft head does not say which layers it reads")
    ids = tuple(i if speculators else i + 1 for i in given)
    unless(not all(0 <= i <= target.layers for i in ids), f"it reads layers {list(given)} of a model that has {target.layers}")
    return ids


def _whole(layer: tuple[Update, ...]) -> tuple[Update, ...]:
    attend = layer[0].mixers[0]
    assert isinstance(attend, Attention)
    return replace(layer[0], mixers=(replace(attend, block=True),)), *layer[1:]


def _block(section: Mapping[str, Any], kind: str, shapes: Shapes, vocab: int, guesses: int, H: int) -> Block:
    size, mask = section.get("block_size"), section.get("mask_token_id")
    if type(size) is not int or size < 2 or type(mask) is not int or not 0 <= mask < vocab:
        raise DamagedError(f"config.json of the draft head has block_size = {size!r}, mask_token_id = {mask!r}")
    earlier = bool(section.get("sample_from_anchor", kind == "DSpark"))
    causal = next((bool(section[n]) for n in ("is_causal", "causal") if section.get(n) is not None), False)
    rank, markov = section.get("markov_rank", 256), None
    if kind == "DSpark" and rank:
        how = str(section.get("markov_head_type", "vanilla"))
        joins = {"vanilla": (), "gated": (Linear((GATE,), (rank,), H + rank, True),)}
        joins["rnn"] = (Linear((JOINT,), (3 * rank,), 2 * rank + H, True),)
        unless(how not in joins, f"its drafts are corrected by {how}")
        markov = Markov(how, rank, W1, Linear((W2,), (guesses,), rank), joins[how])
    return Block(size, mask, earlier, causal, markov, "mask_embedding" if "mask_embedding" in shapes else "")


def _tensors(head: Head, vocab: int) -> dict[str, tuple[int, ...]]:
    m, fuse, block = head.model, head.fuse, head.block
    assert fuse
    assert block
    parts = (m.layers, m.norm, fuse.project, fuse.after, *((block.markov.out, *block.markov.join) if block.markov else ()))
    by_name = {n: t.shape for n, t in part_tensors(parts, "files")}
    by_name |= {"embed_tokens.weight": (vocab, m.hidden)} if head.own_embed else {}
    by_name |= {"lm_head.weight": (m.vocab, m.hidden)} if head.own_head else {}
    by_name |= {f"{W1}.weight": (vocab, block.markov.rank)} if block.markov else {}
    by_name |= {block.vector: (m.hidden,)} if block.vector else {}
    return by_name | ({MAPS[0]: (m.vocab,)} if head.mapped else {})
