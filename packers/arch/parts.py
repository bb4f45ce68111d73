"""The parts of a decoder-only model as data: a layer is a list of updates of the residual stream, and an update has mixers.

Names are those of transformers' modules below the text model: "layers.3.self_attn.q_proj" is
"model.layers.3.self_attn.q_proj.weight" in a plain checkpoint and "model.language_model.layers..." in one with a vision
tower (`Model.prefix`). Shapes are (N, K) = (out_features, in_features). This file imports no torch and computes nothing: the
mixers are defined as torch functions in `lowq_kernels.decode`, and a model is compiled to a plan of those operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "xielu"]
SCALARS = ("alpha_p", "alpha_n", "beta", "eps")  # of the activation xIELU, which transformers holds in a module


@dataclass(frozen=True)
class Linear:
    """A linear layer y = x W^T + b whose rows may be stored as several modules.

    parts: names of the modules. rows: N of each. columns: K. bias: whether each part has a bias.
    """

    parts: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool = False


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last `size` values; "layer" subtracts the mean first.

    name: of the module; "" for a norm without weight. add_one: the factor is 1 + weight. bias: added last.
    groups: this many equal parts of the values are normed separately.
    shape: of the weight in files if it is not (size,); its values in order are the factors.
    """

    name: str
    size: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    add_one: bool = False
    bias: bool = False
    groups: int = 1
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dims` values of a head.

    kind: the key of the config's rope_parameters for this layer; "" if all layers share one set.
    pairing: value i is paired with i + dims / 2 ("halves"), or 2i with 2i + 1 ("neighbours").
    of: the number of values in the exponents of the frequencies, if it is not `dims`.
    """

    dims: int
    kind: str = ""
    pairing: Literal["halves", "neighbours"] = "halves"
    of: int = 0


@dataclass(frozen=True)
class PositionScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / period)) (Llama 4, Ministral 3)."""

    beta: float
    period: float
    offset: int = 0


# The state of a sequence in a layer


@dataclass(frozen=True)
class Pages:
    """Keys and values of every token, or of the last `window` tokens: (heads, k_dim) and (heads, v_dim) per token.

    v_dim 0: values are a prefix of the keys and are not stored separately (latent attention).
    """

    heads: int
    k_dim: int
    v_dim: int
    window: int = 0


@dataclass(frozen=True)
class Recurrent:
    """Tensors of fixed size: name -> shape, one set per sequence. fp32: the names of those stored in fp32."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    fp32: tuple[str, ...] = ()


# Mixers: functions of the normed residual stream whose result is added to it


@dataclass(frozen=True)
class Attention:
    """softmax(scale * q k^T) v over the sequence so far.

    qkv: q, k and v concatenated; gated: each head of q is followed by a gate of its output, sigmoid(gate) * y.
    gate: the layer whose sigmoid multiplies the output of all heads, where it is a module of its own (afmoe.py); `gated` is
    for a q_proj with twice the rows (qwen3_next.py). A family has one of the two at most.
    order "heads": rows are (q, k, v) of head 0, then of head 1, ... (GPT-NeoX).
    clip: values of q, k and v are clamped to -clip .. clip; 0: not.
    window: a token sees itself and the window - 1 tokens before it; 0: all. chunk: it sees only its own chunk of this size.
    norm_over: q_norm and k_norm are over "all" heads at once or over each "head". norm_last: they come after the rotation.
    key_scale: keys are multiplied by it. v_is_k: there is no v, values are the keys before norm and rotation.
    shares: index of the layer whose keys and values this layer reads; it has no k and v of its own.
    block: rows that are computed together all see one another (draft heads that draft a block).
    sinks: name of a vector (heads,) of scores that are part of the softmax but have no value.
    """

    qkv: Linear
    o: Linear
    heads: int
    kv_heads: int
    dim: int
    scale: float
    rope: Rope | None
    window: int = 0
    clip: float = 0.0
    chunk: int = 0
    softcap: float = 0.0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_over: Literal["head", "all"] = "head"
    norm_last: bool = False
    gated: bool = False
    gate: Linear | None = None
    order: Literal["parts", "heads"] = "parts"
    key_scale: float = 1.0
    v_is_k: bool = False
    shares: int | None = None
    sinks: str = ""
    position_scale: PositionScale | None = None
    block: bool = False

    @property
    def state(self) -> Pages | None:
        return None if self.shares is not None else Pages(self.kv_heads, self.dim, self.dim, self.window)


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's MLA: the cache holds per token one latent of `rank` values and one rotated key of `rotated` values.

    down: rows of the queries, or of what `q_up` makes queries of, then the latent, then the rotated key; one product of two
    modules, or a product each where only one of them has a bias. Rows of a head of q are its unrotated values, then its rotated
    ones. q_norm, q_up: of queries of low rank. kv_up: rows of a head are its unrotated keys, then its v_dim values. Source:
    arXiv:2405.04434.
    """

    down: tuple[Linear, ...]
    q_norm: Norm | None
    q_up: Linear | None
    kv_norm: Norm
    kv_up: Linear
    o: Linear
    heads: int
    nope: int
    rotated: int
    v_dim: int
    rank: int
    scale: float
    rope: Rope
    position_scale: PositionScale | None = None

    @property
    def state(self) -> Pages:
        return Pages(1, self.rank + self.rotated, 0)


@dataclass(frozen=True)
class Conv:
    """A causal convolution of each channel over the last `width` tokens. name: of the module."""

    name: str
    channels: int
    width: int
    bias: bool = False


@dataclass(frozen=True)
class GatedDelta:
    """Qwen3-Next's linear attention: S <- exp(g) S + k (beta (v - exp(g) S^T k))^T; y = S^T q, normed and gated by z.

    inputs: q, k, v, z, b (beta), a (g) concatenated; grouped: q, k, v, z of a key head together, then b, a of each
    (Qwen3-Next), else all of q, k, v, then z, b, a (Qwen 3.5). a_log, dt_bias: names of vectors (v_heads,).
    norm: over the v_dim values of a head; its output is multiplied by silu(z).
    Source: Gated Delta Networks (arXiv:2412.06464).
    """

    inputs: Linear
    conv: Conv
    out: Linear
    a_log: str
    dt_bias: str
    norm: Norm
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    grouped: bool = False

    @property
    def state(self) -> Recurrent:
        shapes = (("conv", (self.conv.channels, self.conv.width - 1)), ("S", (self.v_heads, self.k_dim, self.v_dim)))
        return Recurrent(shapes, ("S",))


@dataclass(frozen=True)
class Mamba2:
    """S <- exp(dt A) S + dt x B^T; y = S C + D x, gated by z and normed. Source: Mamba-2 (arXiv:2405.21060).

    inputs: rows are z, x, B, C, dt. scales: factors of those five (Falcon-H1). a_log, dt_bias, d: names of vectors (heads,).
    groups: heads share B and C of N values by group. gate_last: y is normed, then gated. dt: its min. and max. value.
    """

    inputs: Linear
    conv: Conv
    out: Linear
    a_log: str
    dt_bias: str
    d: str
    heads: int
    dim: int
    groups: int
    N: int
    norm: Norm | None
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    gate_last: bool = False
    dt: tuple[float, float] = (0.0, float("inf"))

    @property
    def state(self) -> Recurrent:
        shapes = (("conv", (self.conv.channels, self.conv.width - 1)), ("S", (self.heads, self.dim, self.N)))
        return Recurrent(shapes, ("S",))


@dataclass(frozen=True)
class ShortConv:
    """y = C * conv(B * x), of rows B, C, x of `inputs` (LFM2)."""

    inputs: Linear
    conv: Conv
    out: Linear

    @property
    def state(self) -> Recurrent:
        return Recurrent((("conv", (self.conv.channels, self.conv.width - 1)),))


@dataclass(frozen=True)
class Mlp:
    """down(act(gate x) * up x), or down(act(up x)) if it is not gated. gate_scale: the factor of the gate.

    scalars: module of the scalars of the activation "xielu" (only without a gate): alpha_p, alpha_n, beta, eps.
    """

    up: Linear
    down: Linear
    act: Act
    gated: bool = True
    gate_scale: float = 1.0
    scalars: str = ""
    state = None


@dataclass(frozen=True)
class Router:
    """The router of a mixture: selects a token's experts and their weights.

    name: of the module with weight (experts, hidden). logits_bias: it has a bias, added to the logits. score: the function of
    the logits. bias: name of a vector (experts,) that is added to the scores for the choice alone. groups: (number of groups,
    groups per token); the best groups have the largest sum of two scores, or the largest score ("max").
    normalise: weights are divided by their sum (+ sum_eps). factor: then multiplied by it. rounded: then rounded to x's dtype.
    A softmax over only the chosen experts' logits is a softmax over all, normalised.
    bias_shape: of `bias` in files, if it is not (experts,).
    norm, scale: x is first normed, and multiplied by a vector and hidden^-0.5 (Gemma 4). each: a vector of factors of experts.
    """

    name: str
    experts: int
    hidden: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    logits_bias: bool = False
    bias: str = ""
    bias_shape: tuple[int, ...] = ()
    groups: tuple[int, int] = (1, 1)
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool = True
    sum_eps: float = 0.0
    factor: float = 1.0
    rounded: bool = False
    norm: Norm | None = None
    scale: str = ""
    each: str = ""


@dataclass(frozen=True)
class Experts:
    """The weighted sum of a token's experts, plus a shared MLP.

    module: path of transformers' module that holds them as two stacks. files: path before an expert's number in files.
    leaves: names of an expert's gate, up and down in files (only up and down if it is not gated). bias: they have biases.
    stacked: files hold all experts of a layer in two tensors, and `leaves` are their names below `files`.
    transposed: stacks are (experts, columns, rows) in "files", in files and modules ("both"), or nowhere ("").
    interleaved: rows of gate and up alternate in the stacks. weigh_inputs: weights multiply the experts' inputs (Llama 4).
    shared_gate: name of a linear (1, hidden) whose sigmoid multiplies the shared MLP's output. latent: (down, up) around all.
    """

    router: Router
    module: str
    files: str
    leaves: tuple[str, ...]
    inner: int
    hidden: int
    act: Act
    gated: bool = True
    bias: bool = False
    stacked: bool = False
    transposed: Literal["", "files", "both"] = ""
    interleaved: bool = False
    weigh_inputs: bool = False
    shared: Mlp | None = None
    shared_gate: str = ""
    latent: tuple[Linear, Linear] | None = None
    state = None


@dataclass(frozen=True)
class PerLayer:
    """up(act(gate x) * e), e the token's embedding for this layer (`TokenTable`). Gemma's small models."""

    gate: Linear
    up: Linear
    act: Act
    layer: int
    state = None


@dataclass(frozen=True)
class Branch:
    """A mixer of a parallel block with its own norms or factors: out * post(mixer(into * norm(x)))."""

    mixer: Any
    norm: Norm | None = None
    post: Norm | None = None
    into: float = 1.0
    out: float = 1.0

    @property
    def state(self) -> Pages | Recurrent | None:
        return self.mixer.state


Mixer = Attention | LatentAttention | GatedDelta | Mamba2 | ShortConv | Mlp | Experts | PerLayer | Branch


@dataclass(frozen=True)
class Beside:
    """A token's embedding and a hidden state, each normed, then concatenated: the input of draft heads (`lowq_packers.heads`).

    hidden_first: the hidden state comes first. zero_first: the embedding at position 0 is zero. replaces: from there on the
    residual stream is the normed hidden state.
    """

    embedding: Norm | None
    hidden: Norm | None
    hidden_first: bool = False
    zero_first: bool = False
    replaces: bool = False


@dataclass(frozen=True)
class Merge:
    """The start of a draft head's residual stream: project(beside)."""

    beside: Beside
    project: Linear


@dataclass(frozen=True)
class Update:
    """x <- (x + scale * post(sum of mixers(norm(x)))) * after. Two mixers are a parallel block. after: name of a scalar.

    beside: the input of the mixers of a draft head's first layer, instead of norm(x).
    """

    mixers: tuple[Mixer, ...]
    norm: Norm | None = None
    post: Norm | None = None
    scale: float = 1.0
    after: str = ""
    beside: Beside | None = None


@dataclass(frozen=True)
class TokenTable:
    """For each token and layer `dims` values: (embed[id] * scale + norm(project(x0) * by)) / sqrt(2) (Gemma's small models).

    x0: the embedding of the token (scaled). embed: name of a table (vocab, layers * dims); project: of (layers * dims, hidden).
    """

    embed: str
    vocab: int
    layers: int
    dims: int
    scale: float
    project: Linear
    by: float
    norm: Norm


@dataclass(frozen=True)
class Images:
    """How images enter a text: rows of the tower's features replace the embeddings of image tokens.

    token: the id of the image token. form: the tokens of an image in the text (`hf.pictures.written`): a "run" of image tokens,
    "framed" by two others, "rows" that end in a token, or "tiles". begin, end: ids of the two others.
    around: text around the image, for which templates write `begin`. rows: per image, or per crop of one; 0: by its size.
    patch: side of a patch in pixels. merge: patches per side that become one row of features.
    sections: pairs of a head rotated by a token's position in time, height and width; () if it has one position. interleaved:
    pairs alternate between the three, else sections follow one another. Source: Qwen2-VL (arXiv:2409.12191).
    deepstack: number of first layers after which further features are added (arXiv:2406.04334).
    whole: layers in which an image token sees its whole image, later tokens included: "all", or those with a window.
    """

    token: int
    form: Literal["run", "framed", "rows", "tiles"] = "run"
    begin: int = 0
    end: int = 0
    around: str = ""
    rows: int = 0
    patch: int = 14
    merge: int = 1
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    deepstack: int = 0
    whole: Literal["", "all", "windows"] = ""

    def axes(self, dims: int) -> list[int]:
        """For each of the first `dims` values of a head: which of the three positions rotates it."""
        if self.interleaved:
            axes = [next((a for a in (1, 2) if j % 3 == a and j < 3 * self.sections[a]), 0) for j in range(dims // 2)]
        else:
            axes = [i % 3 for i, n in enumerate(self.sections) for _ in range(n)]
        return axes * 2


@dataclass(frozen=True)
class Model:
    """logits = softcap(logit_scale * head(norm(layers(embed_scale * embed[ids])))).

    prefix: of names in transformers' module tree. embed: name below the prefix. head: full name of the module.
    tied: the head is the embedding. outside_text: prefixes of modules that text does not need (a vision tower).
    files: further prefixes that published files have instead of (prefix, head).
    renamed: (part of a name in modules, its replacement in files), for tensors below the prefix except experts.
    extra: prefixes of full names of tensors that `layers` do not read (MTP heads, run as drafts), written with `prefix` if
    they are below the text model. images: how images enter; None if it takes no images.
    merge: the input of a draft head's layers, by default the hidden state itself. lent: of a draft head, the layers of its
    target whose keys and values come first in its state; `Attention.shares` then names one of them.
    read_as: image or sound tokens -> the token whose embedding they get in a text without images or sound.
    """

    layers: tuple[tuple[Update, ...], ...]
    norm: Norm
    vocab: int
    hidden: int
    tied: bool = False
    embed: str = "embed_tokens"
    head: str = "lm_head"
    head_bias: bool = False
    embed_norm: Norm | None = None
    embed_scale: float = 1.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    tokens: TokenTable | None = None
    prefix: str = "model."
    outside_text: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()
    merge: Merge | None = None
    lent: tuple[int, ...] = ()
    images: Images | None = None
    read_as: tuple[tuple[int, int], ...] = ()


def walk(part: Any) -> Iterator[Any]:
    """All parts inside `part`, itself first, in the order of the fields."""
    if isinstance(part, tuple):
        for one in part:
            yield from walk(one)
    elif hasattr(part, "__dataclass_fields__"):
        yield part
        for f in fields(part):
            value = getattr(part, f.name)
            if isinstance(value, tuple) or hasattr(value, "__dataclass_fields__"):
                yield from walk(value)


def mixers(model: Model) -> Iterator[tuple[int, Any]]:
    """(layer, mixer) of every mixer of a model, branches opened, in the order in which they run."""
    for i, layer in enumerate(model.layers):
        for update in layer:
            for mixer in update.mixers:
                yield i, mixer.mixer if isinstance(mixer, Branch) else mixer
