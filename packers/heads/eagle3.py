"""EAGLE-3 heads of SafeAILab, SpecForge and speculators: one layer that reads three layers of the target; and P-EAGLE heads.

P-EAGLE drafts all tokens at once: it uses a mask token and a learnt vector for tokens and hidden states not yet known.
Source: EAGLE-3 (arXiv:2503.01840); the files' names and config keys as SafeAILab/EAGLE, SpecForge and vllm-project/speculators
write them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch.common import unless
from lowq_packers.arch.config import read_config
from lowq_packers.arch.names import part_tensors
from lowq_packers.arch.parts import Beside, Linear, Model, Norm, Update
from lowq_packers.errors import DamagedError
from lowq_packers.heads.parts import MAPS, MASK, Fuse, Head, Read, Shapes, Target, check_tensors

LAYERS = "eagle_aux_hidden_state_layer_ids"
BUFFERS = ("t2d", "verifier_", "layers.0.self_attn.rotary_emb.", "rotary_emb.")  # used in training, or computed here
SIZES = {  # defaults of transformers' config classes for sizes that `transformer_layer_config` leaves out
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


def read(config: Mapping[str, Any], shapes: Shapes, target: Target) -> Read:
    """The head of a folder's config.json and tensors."""
    files = {_plain(name): name for name in shapes}
    shapes = {name: shapes[whole] for name, whole in files.items()}
    speculators, parallel = "speculators_model_type" in config, config.get("speculators_model_type") == "peagle"
    inside = dict(config.get("transformer_layer_config") or {}) if speculators else dict(config)
    count = len({n.split(".")[1] for n in shapes if n.startswith("layers.")})
    inside = {"model_type": "llama", **inside, "num_hidden_layers": max(count, 1)}
    inside = {**SIZES.get(inside["model_type"], {}), **inside} if speculators else inside
    inside.setdefault("vocab_size", target.model.vocab)
    inside.setdefault("max_position_embeddings", getattr(target.config, "max_position_embeddings", 2048))
    for name in ("layer_types", "sliding_window"):  # these describe the target's layers; some files repeat them
        inside.pop(name, None)
    c, model, _ = read_config(inside)
    unless(c.vocab_size != target.model.vocab, f"it is for a vocabulary of {c.vocab_size}, the model has {target.model.vocab}")
    H, wide = c.hidden_size, config.get("target_hidden_size") or target.model.hidden
    unless(wide != target.model.hidden, f"it is for hidden states of {wide} values, the model has {target.model.hidden}")
    taps, note = _taps(config, shapes, target, wide)
    head = _head(config, shapes, model, c, taps, wide, speculators)
    named = config.get("draft_vocab_size")
    rows = shapes.get("d2t") or shapes.get("lm_head.weight") or (named or c.vocab_size,)
    guesses = rows[0]
    head = replace(head, model=replace(head.model, vocab=guesses), mapped="d2t" in shapes)
    if parallel:
        token = config.get("mask_token_id", config.get("pard_token"))
        if type(token) is not int or not 0 <= token < c.vocab_size:
            raise DamagedError(f"mask_token_id of the draft head is {token!r}, which is not a token of the model")
        head = replace(head, kind="P-EAGLE", parallel=token)
    if named and named != guesses:
        raise DamagedError(f"the draft head chooses among {guesses} tokens, its config.json says draft_vocab_size = {named}")
    if guesses != c.vocab_size and not head.mapped:
        raise DamagedError(
            f"the draft head chooses among {guesses} of {c.vocab_size} tokens, but d2t, the list of these tokens, is missing"
        )
    if not head.own_embed and target.model.hidden != H:
        raise DamagedError(f"the draft head has no embed_tokens, and its width {H} is not the model's {target.model.hidden}")
    check_tensors(_tensors(head, c.vocab_size), shapes, BUFFERS)
    return Read(head, c, files, note)


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _taps(config: Mapping[str, Any], shapes: Shapes, target: Target, wide: int) -> tuple[tuple[int, ...], str]:
    """The layers whose inputs are read, and a note on what was assumed."""
    n, inner = target.layers, config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        return (), ""
    if "fc.weight" not in shapes:
        raise DamagedError("the draft head has no tensor fc.weight, which its config.json asks for")
    default, outputs = (2, n // 2, n - 3), (1, n // 2 - 1, n - 4)
    given = config.get(LAYERS)
    ids = tuple(given or inner.get(LAYERS) or inner.get("layer_ids") or default)
    if any(type(i) is not int for i in ids):
        raise DamagedError(f"{LAYERS} of the draft head is {list(ids)}, which are not indices of layers")
    note = ""
    if n not in ids and (ids == outputs or not (given or ids == default)):  # SGLang counts layers by their outputs
        ids, note = tuple(i + 1 for i in ids), f"reads what leaves layers {', '.join(map(str, ids))}"
    read = (shapes["fc.weight"] or (len(ids) * wide,))[-1]
    unless(read != len(ids) * wide, f"fc reads {read / wide:g} layers, config.json names {len(ids)}")
    unless(not all(0 <= i <= n for i in ids), f"it reads layers {list(ids)} of a model that has {n}")
    return ids, note


def _head(
    config: Mapping[str, Any], shapes: Shapes, model: Model, c: Any, taps: tuple[int, ...], wide: int, speculators: bool
) -> Head:
    H, eps = c.hidden_size, float(c.rms_norm_eps)
    before: tuple[Norm, ...] = ()
    if config.get("norm_before_fc"):
        before = (Norm("input_norm", len(taps) * wide, eps),)
    elif config.get("fc_norm"):
        before = tuple(Norm(f"fc_norm.{i}", wide, eps) for i in range(len(taps)))
    fuse = Fuse(Linear(("fc",), (H,), len(taps) * wide, "fc.bias" in shapes), before) if taps else None
    (attend, then), *later = model.layers
    mixer: Any = attend.mixers[0]
    beside = Beside(
        Norm("layers.0.input_layernorm", H, eps),
        Norm("layers.0.hidden_norm", H, eps),
        replaces=bool(config.get("norm_before_residual", speculators)),
    )
    first = Update((replace(mixer, qkv=replace(mixer.qkv, columns=2 * H)),), beside=beside), then
    rest = [_renamed(layer, i + 1, shapes) for i, layer in enumerate(later)]
    own_head = "lm_head.weight" in shapes
    decoder = replace(model, layers=(first, *rest), prefix="", files=(), extra=(), outside_text=(), renamed=(), tied=False)
    recycled: Any = "normed" if config.get("norm_output") else "stream"
    return Head("EAGLE-3", decoder, taps, fuse, recycled, "embed_tokens.weight" in shapes, own_head)


def _renamed(layer: tuple[Update, ...], i: int, shapes: Shapes) -> tuple[Update, ...]:
    """A further layer, whose first norm some files call hidden_norm."""
    old = f"layers.{i}.hidden_norm"
    if f"{old}.weight" not in shapes or layer[0].norm is None:
        return layer
    return replace(layer[0], norm=replace(layer[0].norm, name=old)), *layer[1:]


def _tensors(head: Head, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that the head must have. vocab: of the target."""
    m, parts = head.model, (head.model.layers, head.model.norm, *((head.fuse.project, head.fuse.before) if head.fuse else ()))
    by_name = {n: t.shape for n, t in part_tensors(parts, "files")}
    if head.own_embed:
        by_name["embed_tokens.weight"] = (vocab, m.hidden)
    if head.own_head:
        by_name["lm_head.weight"] = (m.vocab, m.hidden)
    if head.parallel is not None and head.fuse:
        by_name[MASK] = (1, 1, head.fuse.project.columns)
    return by_name | ({MAPS[0]: (m.vocab,)} if head.mapped else {})
