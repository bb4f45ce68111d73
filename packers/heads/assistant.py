"""Gemma 4's assistants: small layers without keys and values of their own, which attend to those of the model's cache.

All guesses of a round are made at the position of the newest token, whose keys and values the model has not computed yet; only
the token and the hidden state change from guess to guess. Source: transformers' Gemma4AssistantForCausalLM, and its
SinglePositionMultiTokenCandidateGenerator for the loop over guesses.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch.common import unless
from lowq_packers.arch.config import read_config
from lowq_packers.arch.names import part_tensors
from lowq_packers.arch.parts import Attention, Beside, Linear, Merge, Update
from lowq_packers.errors import DamagedError
from lowq_packers.heads.parts import Assistant, Head, Read, Shapes, Target, check_tensors

KIND, TEXT = "gemma4_assistant", "gemma4_text"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")  # of Gemma 4, which no assistant has


def read(config: Mapping[str, Any], shapes: Shapes, target: Target) -> Read:
    """The assistant of a folder's config.json and tensors."""
    family = getattr(target.config, "model_type", None)
    unless(family != TEXT, f"it reads keys and values of a Gemma 4 model, and the model is {family}")
    files = {name.removeprefix("model."): name for name in shapes}
    shapes = {name: shapes[whole] for name, whole in files.items()}
    inside = config.get("text_config")
    if not isinstance(inside, Mapping):
        raise DamagedError("config.json of the draft head has no text_config")
    # as if its layers had keys of their own: `_borrowing` then takes these away
    c, model, _ = read_config({"model_type": TEXT, **inside, "num_kv_shared_layers": 0})
    odd = [name for name in ABSENT if getattr(c, name, None)]
    unless(odd, f"its config.json has {', '.join(odd)}")
    wide, H = config.get("backbone_hidden_size"), target.model.hidden
    unless(wide != H, f"it is for hidden states of {wide} values, the model has {H}")
    unless(c.vocab_size != target.model.vocab, f"it is for a vocabulary of {c.vocab_size}, the model has {target.model.vocab}")
    layers = tuple((_borrowing(layer[0], target), *layer[1:]) for layer in model.layers)
    lent = {update.mixers[0].shares for update, *_ in layers}  # type: ignore[union-attr]
    head = "lm_head" if "lm_head.weight" in shapes else "embed_tokens"
    merge = Merge(Beside(None, None), Linear(("pre_projection",), (c.hidden_size,), 2 * H))
    decoder = replace(
        model, layers=layers, prefix="", files=(), extra=(), tied=False, embed_scale=1.0, softcap=0.0, tokens=None, merge=merge,
        head=head, lent=tuple(sorted(i for i in lent if i is not None)),
    )  # fmt: skip
    assistant = Assistant(Linear(("post_projection",), (H,), c.hidden_size), _centroids(config, c.vocab_size))
    expected = {n: t.shape for n, t in part_tensors((layers, model.norm, merge, assistant.back), "files")}
    expected[f"{head}.weight"] = c.vocab_size, c.hidden_size
    if assistant.centroids:
        expected |= {CENTROIDS: (assistant.centroids[0], c.hidden_size), ORDER: (c.vocab_size,)}
    check_tensors(expected, shapes, ("embed_tokens.weight",))
    return Read(Head("Gemma 4 assistant", decoder, (), None, "normed", own_head=True, assistant=assistant), c, files)


def _borrowing(update: Update, target: Target) -> Update:
    """A layer's attention over the keys and values of the last layer of the model that has its own, of the same kind."""
    mixer = update.mixers[0]
    assert isinstance(mixer, Attention)
    of_layers = {i: layer[0].mixers[0] for i, layer in enumerate(target.model.layers)}
    own = {i: m for i, m in of_layers.items() if isinstance(m, Attention) and m.shares is None}
    number = max((i for i, m in own.items() if bool(m.window) == bool(mixer.window)), default=None)
    unless(number is None, f"the model has no layer {'with' if mixer.window else 'without'} a window")
    assert number is not None
    facts = [(m.kv_heads, m.dim, m.window) for m in (mixer, own[number])]
    words = (f"{heads} heads of {dim} values" + f" in a window of {window}" * bool(window) for heads, dim, window in facts)
    unless(facts[0] != facts[1], f"it reads keys of {next(words)}, those of the model's layer {number} are {next(words)}")
    q = replace(mixer.qkv, parts=mixer.qkv.parts[:1], rows=mixer.qkv.rows[:1])
    return replace(update, mixers=(replace(mixer, qkv=q, k_norm=None, v_norm=None, v_is_k=False, shares=number),))


def _centroids(config: Mapping[str, Any], vocab: int) -> tuple[int, int] | None:
    if not config.get("use_ordered_embeddings"):
        return None
    count, chosen = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    if type(count) is not int or type(chosen) is not int or not 0 < chosen <= count or vocab % count:
        raise DamagedError(f"config.json of the draft head has num_centroids = {count!r}, of which it takes {chosen!r}")
    return count, chosen
