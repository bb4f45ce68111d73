"""MTP layers, which publishers add to a model: one more decoder layer that reads a token and a hidden state.

Supported: Qwen3-Next and Qwen 3.5 (tensors under `mtp.`), DeepSeek V3, GLM-4.5 and relatives (one more layer after the last),
MiMo, and folders of speculators with such a layer, for any model. The MTP layer is of the same kind as the model's layers.
Embedding and output head are the model's, unless the files of a checkpoint hold copies with the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowq_packers.arch.names import part_tensors
from lowq_packers.arch.parts import Attention, Beside, Branch, LatentAttention, Linear, Merge, Norm, Update
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.heads.parts import Head, Read, Shapes, Target, check_tensors, moved

LAYER = "layers.0"  # of the head, in its description


@dataclass(frozen=True)
class Style:
    """How a publisher names and joins the parts of an MTP layer.

    files: prefix of the tensors' names in files, {n} is the number of layers; ours: the prefix in the description.
    names: of the embedding's norm, the hidden state's norm, the linear layer over both, and the last norm.
    hidden_first, zero_first: as in `Beside`.
    """

    files: str
    ours: str
    names: tuple[str, str, str, str]
    hidden_first: bool = False
    zero_first: bool = False


QWEN = Style("mtp.", "", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
NEXTN = Style(
    "model.layers.{n}.", f"{LAYER}.", tuple(f"{LAYER}.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),  # type: ignore[arg-type]
    zero_first=True,
)  # fmt: skip
MIMO = Style(
    "model.mtp_layers.0.", f"{LAYER}.",
    tuple(f"{LAYER}.{n}" for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),  # type: ignore[arg-type]
    hidden_first=True, zero_first=True,
)  # fmt: skip
# speculators' `mtp`, a folder of its own; the embedding and the output head that it may hold are copies of the model's
ALONE = replace(MIMO, files="mtp_layers.0.", zero_first=False)
COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
STYLES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), QWEN),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe", "glm4_moe_lite"), NEXTN),
    "mimo": MIMO,
}
EMBED, HEAD = f"{LAYER}.embed_tokens", f"{LAYER}.shared_head.head"


def style_of(config: Mapping[str, Any]) -> Style | None:
    """How the MTP layers of a config.json's family are published; None if that family's are not supported."""
    return STYLES.get(str(config.get("model_type")))


def prefix_of(config: Mapping[str, Any], target: Target, names: Any) -> str:
    """The prefix of a checkpoint's MTP tensors; "" if it has none."""
    style = style_of(config)
    if style is None:
        return ""
    name = style.files.format(n=target.layers)
    inside = name.removeprefix("model.")
    places = (name, *(place + inside for place in ("model.language_model.", "language_model.model.")))
    return next((p for p in places if any(n.startswith(p) for n in names)), "")


def read(config: Mapping[str, Any], shapes: Shapes, target: Target) -> Read:
    """The first MTP layer of a checkpoint. Raises UnsupportedError if lowq runs none, DamagedError if parts are missing."""
    style = style_of(config)
    prefix = prefix_of(config, target, shapes)
    if style is None or not prefix:
        kind = config.get("model_type")
        why = "are not supported" if style is None else "are not in its files, whatever config.json says of them"
        raise UnsupportedError(f"MTP layers of {kind} {why}; drafts without a model: --draft ngram")
    return _layer_read(style, prefix, shapes, target)


def read_alone(config: Mapping[str, Any], shapes: Shapes, target: Target) -> Read:
    """The MTP layer in a folder of speculators. Raises UnsupportedError or DamagedError if it is not one that lowq runs."""
    if config.get("num_centroids") is not None:
        raise UnsupportedError("draft heads whose output head has centroids are not supported")
    if stray := [n for n in shapes if not n.startswith(ALONE.files) and n not in COPIES]:
        raise DamagedError(f"the draft head has a tensor that is not known: {stray[0]} ({len(stray)} of {len(shapes)})")
    return _layer_read(ALONE, ALONE.files, shapes, target)


def _layer_read(style: Style, prefix: str, shapes: Shapes, target: Target) -> Read:
    """The MTP layer whose tensors begin with `prefix`."""
    files = {style.ours + name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
    shapes = {ours: shapes[name] for ours, name in files.items()}
    model = target.model
    H, eps, one = model.hidden, model.norm.eps, model.norm.add_one
    e, h, project, last = style.names
    beside = Beside(Norm(e, H, eps, add_one=one), Norm(h, H, eps, add_one=one), style.hidden_first, style.zero_first)
    merge = Merge(beside, Linear((project,), (H,), 2 * H))
    layer = moved(_layer(target), f"layers.{_number(target)}", LAYER)
    own_embed, own_head = f"{EMBED}.weight" in shapes, f"{HEAD}.weight" in shapes
    decoder = replace(
        model, layers=(layer,), norm=Norm(last, H, eps, add_one=one), prefix="", files=(), extra=(), outside_text=(),
        tied=False, embed=EMBED, head=HEAD, head_bias=False, embed_norm=None, tokens=None, merge=merge,
    )  # fmt: skip
    head = Head("MTP", decoder, (), None, "normed", own_embed, own_head)
    form: Any = "files" if any("experts.gate_up_proj" in n for n in shapes) else "split"
    expected = {n: t.shape for n, t in part_tensors((decoder.layers, decoder.norm, merge), form)}
    expected |= {f"{n}.weight": (model.vocab, H) for n, separate in ((EMBED, own_embed), (HEAD, own_head)) if separate}
    if not any(n.startswith(f"{LAYER}.") and "attn" in n for n in shapes):
        raise DamagedError(f"the MTP layer lacks tensors: of {prefix}* the files hold {len(shapes)}")
    check_tensors(expected, shapes, tuple(f"layers.{i}." for i in range(1, 8)))
    return Read(head, target.config, files)


def _number(target: Target) -> int:
    """The model's last layer that attends to all tokens: an MTP layer is of the same kind."""
    for i in reversed(range(target.layers)):
        mixer = target.model.layers[i][0].mixers[0]
        mixer = mixer.mixer if isinstance(mixer, Branch) else mixer
        if isinstance(mixer, Attention | LatentAttention) and not getattr(mixer, "window", 0):
            return i
    raise UnsupportedError("an MTP layer needs a model with a layer that attends to all tokens")


def _layer(target: Target) -> tuple[Update, ...]:
    return target.model.layers[_number(target)]
