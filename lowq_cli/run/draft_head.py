"""A trainable EAGLE-3 or P-EAGLE draft head: its tensors under their published names, its loss over several draft tokens.

In use, EAGLE-3's second guess reads the head's own first hidden state, the third reads the second, and so on; training does
the same (training-time test). P-EAGLE's later guesses read a mask token and a learnt vector instead, so that one pass makes
all of them. At guess j the row of position t is at position t + j: it attends to the rows up to t as the first guess saw them,
and to its own j guesses. Source: EAGLE-3 (arXiv:2503.01840).
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lowq_cli.engine.plan import Plan
from lowq_packers.arch.parts import Attention, Mlp, mixers
from lowq_packers.errors import UnsupportedError

TURNED = 1024  # positions of the rotary table: those of a window of text and of the guesses after it
LATER = 0.8  # weight of a guess's loss relative to the previous guess's, as in EAGLE-3
KINDS = ("eagle3", "peagle")
GUESSES = {"eagle3": 5, "peagle": 7}  # draft tokens per round that a head is trained for; P-EAGLE's cost little more than one
DEPTH = 2  # layers of a P-EAGLE head; published heads have 4, for models of 32 layers and more


@dataclass(frozen=True)
class Sizes:
    """Sizes of a head and its model. guesses: tokens of the head's reduced vocabulary. taps: layers whose input it reads."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    guesses: int
    layers: int
    eps: float
    theta: float
    positions: int
    taps: tuple[int, int, int]
    kind: str = KINDS[0]
    mask: int = 0  # the mask token, in place of tokens that are not known yet

    @property
    def in_a_row(self) -> int:
        """Draft tokens per round that the head is trained for."""
        return GUESSES[self.kind]

    @property
    def names(self) -> list[str]:
        """Names of the head's layers: SafeAILab's and SpecForge's for EAGLE-3, speculators' for P-EAGLE."""
        return ["midlayer"] if self.kind == KINDS[0] else [f"layers.{i}" for i in range(DEPTH)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the head's tensors, by their published names."""
        H, q, kv = self.hidden, self.heads * self.dim, self.kv_heads * self.dim
        by_name: dict[str, tuple[int, ...]] = {"fc": (H, 3 * H), "norm": (H,), "lm_head": (self.guesses, H)}
        for i, p in enumerate(self.names):
            K = H if i else 2 * H
            inside: dict[str, tuple[int, ...]] = {
                "self_attn.q_proj": (q, K), "self_attn.k_proj": (kv, K), "self_attn.v_proj": (kv, K),
                "self_attn.o_proj": (H, q), "mlp.gate_proj": (self.inner, H), "mlp.up_proj": (self.inner, H),
                "mlp.down_proj": (H, self.inner), "input_layernorm": (H,), "post_attention_layernorm": (H,),
            }  # fmt: skip
            by_name |= {f"{p}.{n}": shape for n, shape in inside.items()} | ({} if i else {f"{p}.hidden_norm": (H,)})
        masked = {"mask_hidden": (1, 1, 3 * H)} if self.kind == KINDS[1] else {}
        return {f"{n}.weight": shape for n, shape in by_name.items()} | masked

    @property
    def params(self) -> int:
        """Weights of a head."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def config(self) -> dict[str, object]:
        """The head's config.json as SpecForge and SafeAILab write it, P-EAGLE's as speculators does; taps are layer inputs."""
        layer: dict[str, object] = {
            "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": len(self.names), "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.dim, "hidden_act": "silu", "rms_norm_eps": self.eps,
            "rope_theta": self.theta, "max_position_embeddings": self.positions, "vocab_size": self.vocab,
            "attention_bias": False, "mlp_bias": False,
        }  # fmt: skip
        facts = {
            "draft_vocab_size": self.guesses, "target_hidden_size": self.hidden, "tie_word_embeddings": False,
            "norm_before_residual": False, "dtype": "bfloat16", "eagle_aux_hidden_state_layer_ids": list(self.taps),
        }  # fmt: skip
        if self.kind == KINDS[0]:
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **facts}
        proposal = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        how = {"algorithm": KINDS[1], "proposal_methods": [proposal], "default_proposal_method": "greedy", "verifier": {}}
        named = {"architectures": ["PEagleSpeculator"], "speculators_model_type": KINDS[1], "speculators_version": "0.4.0"}
        return {**named, "transformer_layer_config": layer, "speculators_config": how, "mask_token_id": self.mask, **facts}


def sizes(plan: Plan, guesses: int, kind: str = KINDS[0]) -> Sizes:
    """The sizes of a head whose layers are as wide as the model's. Raises UnsupportedError for a model without attention."""
    model, config = plan.model, plan.config
    attention = next((m for _, m in mixers(model) if isinstance(m, Attention)), None)
    n, H = len(model.layers), model.hidden
    if n < 3:
        raise UnsupportedError(f"a draft head reads three layers, and the model has only {n}")
    mlp = next((m.down.columns for _, m in mixers(model) if isinstance(m, Mlp)), 0) or 4 * H
    heads, kv, dim = (
        (attention.heads, attention.kv_heads, attention.dim) if attention else (max(1, H // 128), max(1, H // 128), min(H, 128))
    )
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
    taps = (2, n // 2, n - 3) if n >= 12 else (1, n // 2, n)  # in a model of few layers, the last one is the most informative
    positions = getattr(config, "max_position_embeddings", None) or 4096
    return Sizes(
        H, mlp, heads, kv, dim, model.vocab, min(guesses, model.vocab), n, model.norm.eps, float(theta), positions, taps, kind
    )  # fmt: skip


class Learner(nn.Module):
    """The trainable head. first: initial values of some tensors; the rest are initialised at random."""

    def __init__(self, of: Sizes, first: dict[str, torch.Tensor], device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.of, g = of, torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for name, shape in of.shapes.items():
            t = first.get(name)
            if t is None:
                drawn = torch.randn(shape, generator=g)
                t = torch.ones(shape) if len(shape) == 1 else drawn if len(shape) == 3 else drawn * 0.5 * shape[-1] ** -0.5
            self.weights[name.replace(".", "/")] = nn.Parameter(t.float().to(device).clone())
        at = torch.arange(TURNED, device=device)[:, None]
        angles = at * of.theta ** (-torch.arange(0, of.dim, 2, device=device) / of.dim)
        self.cos, self.sin = angles.cos(), angles.sin()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their published names."""
        return {n.replace("/", "."): p.detach() for n, p in self.weights.items()}

    def _w(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.of.eps)
        return (y * self._w(name)).to(x.dtype)

    def _heads(self, x: torch.Tensor, name: str, first: int | None) -> torch.Tensor:
        """The projection of that name as (B, heads, T, D), rotated to positions from `first` on if that is given."""
        y = F.linear(x, self._w(name)).unflatten(-1, (-1, self.of.dim)).transpose(1, 2)
        if first is None:
            return y
        c, s = (t[first : first + y.shape[2]].to(y.dtype) for t in (self.cos, self.sin))
        a, b = y.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, J: int, mask: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Logits (B, T, Vd) of each of J successive guesses.

        embeddings: (B, T + J - 1, H), of the token after each row's. features: (B, T, 3 H). mask: (H,), of the mask token.
        """
        T, f, logits, parallel = features.shape[1], F.linear(features, self._w("fc")), [], self.of.kind == KINDS[1]
        unknown = F.linear(self.weights["mask_hidden"].to(features.dtype), self._w("fc")) if parallel else None
        caches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in self.of.names]
        for j in range(J):
            e, x = embeddings[:, j : j + T], f
            if j and unknown is not None:
                assert mask is not None
                e, x = mask.to(e.dtype).expand_as(e), unknown.expand_as(f)
            for i, (p, cache) in enumerate(zip(self.of.names, caches, strict=True)):
                u = self._norm(x if i else e, f"{p}.input_layernorm")
                x = self._layer(p, u if i else torch.cat((u, self._norm(x, f"{p}.hidden_norm")), -1), x, j, *cache)
            f = f if parallel else x
            logits.append(F.linear(self._norm(x, "norm"), self._w("lm_head")))
        return logits

    def _layer(
        self, p: str, u: torch.Tensor, x: torch.Tensor, j: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Run one layer at guess j on its attention's input and the residual stream; append to the guesses' keys and values."""
        q = self._heads(u, f"{p}.self_attn.q_proj", j)
        keys.append(self._heads(u, f"{p}.self_attn.k_proj", j))
        values.append(self._heads(u, f"{p}.self_attn.v_proj", None))
        y = attended(q, keys, values).transpose(1, 2).flatten(2)
        s = x + F.linear(y, self._w(f"{p}.self_attn.o_proj"))
        m = self._norm(s, f"{p}.post_attention_layernorm")
        gate, up = (F.linear(m, self._w(f"{p}.mlp.{n}_proj")) for n in ("gate", "up"))
        return s + F.linear(F.silu(gate) * up, self._w(f"{p}.mlp.down_proj"))


def attended(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention of queries (B, heads, T, D): row t attends to rows up to t of the first keys and to row t of later keys."""
    share = q.shape[1] // keys[0].shape[1]
    k, v = ([t.repeat_interleave(share, 1) for t in ts] for ts in (keys, values))
    if len(k) == 1:
        return F.scaled_dot_product_attention(q, k[0], v[0], is_causal=True)
    T, scale = q.shape[2], q.shape[-1] ** -0.5
    past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k[0].transpose(-1, -2)).float().masked_fill(~past, float("-inf"))
    own_scores = torch.stack([(q * t).sum(-1).float() for t in k[1:]], -1)
    p = (torch.cat((scores, own_scores), -1) * scale).softmax(-1).to(q.dtype)
    return p[..., :T] @ v[0] + sum(p[..., T + i, None] * t for i, t in enumerate(v[1:]))


def loss_of(logits: list[torch.Tensor], expected: torch.Tensor) -> torch.Tensor:
    """Cross entropy of all guesses with the model's distribution; expected: its logits (B, T + J - 1, Vd), one token ahead."""
    T = logits[0].shape[1]
    total = logits[0].new_zeros((), dtype=torch.float32)
    for j, logits_of_guess in enumerate(logits):
        p = expected[:, j : j + T].float().softmax(-1)
        total = total - LATER**j * (p * logits_of_guess.float().log_softmax(-1)).sum(-1).mean()
    return total


def right(logits: list[torch.Tensor], best: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """(J,) share of rows whose guesses 0 .. j all equal the model's top tokens `best` (B, T + J - 1). ids: (Vd,) token ids."""
    T, so_far, shares = logits[0].shape[1], None, []
    for j, logits_of_guess in enumerate(logits):
        same = ids[logits_of_guess.argmax(-1)] == best[:, j : j + T]
        so_far = same if so_far is None else so_far & same
        shares.append(so_far.float().mean())
    return torch.stack(shares)
