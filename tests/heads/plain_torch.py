"""Draft heads in plain torch, from published tensors by their published names: the reference for the engine's plans.

Nothing of lowq is used. A head is asked for K further tokens after a text by running all its rows anew for each of them.
"""

import copy

import torch
from torch.nn import functional as F


def rms(x, weight, eps, one=False):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y * ((1.0 + weight.float()) if one else weight.float())).to(x.dtype)


def turned(x, theta):
    """x (rows, heads, D), row t at position t, all of a head turned in halves."""
    D = x.shape[-1]
    at = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(0, D, 2) / D)
    c, s = (f(at)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


class Eagle3:
    """tensors: by published names without a prefix, the first layer as `midlayer`. streams: taps' features side by side."""

    def __init__(self, tensors, config, embed=None, lm_head=None):
        self.w = {n.removeprefix("model.").replace("layers.0.", "midlayer."): t.float() for n, t in tensors.items()}
        self.c = config
        self.embed = self.w.get("embed_tokens.weight", embed)
        self.lm_head = self.w.get("lm_head.weight", lm_head)

    def features(self, states):
        """(rows, Hd) of the taps' (rows, H)."""
        if not states or "fc.weight" not in self.w:
            return states[0]
        if self.c.get("fc_norm"):
            states = [rms(x, self.w[f"fc_norm.{i}.weight"], self.c["rms_norm_eps"]) for i, x in enumerate(states)]
        x = torch.cat(states, -1)
        if self.c.get("norm_before_fc"):
            x = rms(x, self.w["input_norm.weight"], self.c["rms_norm_eps"])
        return F.linear(x, self.w["fc.weight"], self.w.get("fc.bias"))

    def layer(self, ids, f):
        w, c, eps = self.w, self.c, self.c["rms_norm_eps"]
        h = rms(f, w["midlayer.hidden_norm.weight"], eps)
        u = torch.cat((rms(self.embed[ids], w["midlayer.input_layernorm.weight"], eps), h), -1)
        x = self.inside("midlayer", u, h if c.get("norm_before_residual") else f)
        for i in range(1, 9):
            if f"layers.{i}.input_layernorm.weight" in w:
                x = self.inside(f"layers.{i}", rms(x, w[f"layers.{i}.input_layernorm.weight"], eps), x)
        return x

    def inside(self, p, u, x):
        """Layer p, of what its attention is given and of the residual stream."""
        w, c, eps = self.w, self.c, self.c["rms_norm_eps"]
        heads, kv, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v = (F.linear(u, w[f"{p}.self_attn.{n}_proj.weight"]).unflatten(-1, (-1, D)) for n in "qkv")
        if f"{p}.self_attn.q_norm.weight" in w:
            q, k = (rms(x, w[f"{p}.self_attn.{n}_norm.weight"], eps) for n, x in (("q", q), ("k", k)))
        q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1).flatten(1)
        s = x + F.linear(y, w[f"{p}.self_attn.o_proj.weight"])
        m = rms(s, w[f"{p}.post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(m, w[f"{p}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return s + F.linear(F.silu(gate) * up, w[f"{p}.mlp.down_proj.weight"])

    def __call__(self, ids, states, K):
        """(drafts, logits of each, normed states): K tokens after rows whose next tokens are ids (rows,)."""
        f, drafts, logits = self.features(states), [], []
        for _ in range(K):
            o = self.layer(ids, f)
            y = rms(o, self.w["norm.weight"], self.c["rms_norm_eps"])
            logits.append(F.linear(y[-1], self.lm_head))
            best = int(logits[-1].argmax())
            drafts.append(best + int(self.w["d2t"][best]) if "d2t" in self.w else best)
            again = y if self.c.get("norm_output") else o
            ids, f = torch.cat((ids, torch.tensor([drafts[-1]]))), torch.cat((f, again[-1:]))
        return drafts, torch.stack(logits)


class PEagle(Eagle3):
    """All guesses at once: rows whose token is the mask and whose features are the learnt ones, behind those that are known."""

    def __call__(self, ids, states, K):
        n, mask = len(ids), torch.full((K - 1,), self.c["mask_token_id"])
        unknown = self.features(list(self.w["mask_hidden"].reshape(1, -1).chunk(len(states), -1)))
        o = self.layer(torch.cat((ids, mask)), torch.cat((self.features(states), unknown.expand(K - 1, -1))))
        logits = F.linear(rms(o, self.w["norm.weight"], self.c["rms_norm_eps"]), self.lm_head)[n - 1 :]
        best = logits.argmax(-1)
        return (best + self.w["d2t"][best] if "d2t" in self.w else best).long().tolist(), logits


class Blocks:
    """DFlash and DSpark: a block of masks behind the newest token, whose rows see the text's features and one another."""

    def __init__(self, tensors, config, embed, lm_head):
        self.w, self.c = {n: t.float() for n, t in tensors.items()}, config
        self.embed, self.lm_head = self.w.get("embed_tokens.weight", embed), self.w.get("lm_head.weight", lm_head)

    def __call__(self, anchor, states, K):
        """K tokens behind `anchor`, of the features of all tokens before it, (n, H) each."""
        w, c, eps = self.w, self.c, self.c["rms_norm_eps"]
        heads, kv, D, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["block_size"]
        context = rms(F.linear(torch.cat(states, -1), w["fc.weight"]), w["hidden_norm.weight"], eps)
        ids = torch.tensor([anchor] + [c["mask_token_id"]] * (size - 1))
        x = self.embed[ids]
        if "mask_embedding" in w:
            x = torch.cat((x[:1], w["mask_embedding"].expand(size - 1, -1)))
        for i in range(c["num_hidden_layers"]):
            p, u = f"layers.{i}", rms(x, w[f"layers.{i}.input_layernorm.weight"], eps)
            both = torch.cat((context, u))
            q, k, v = (
                F.linear(t, w[f"{p}.self_attn.{n}_proj.weight"]).unflatten(-1, (-1, D))
                for n, t in (("q", u), ("k", both), ("v", both))
            )
            q, k = (rms(t, w[f"{p}.self_attn.{n}_norm.weight"], eps) for n, t in (("q", q), ("k", k)))
            q, k = (
                turned(torch.cat((q.new_zeros(len(context), *q.shape[1:]), q)), c["rope_theta"])[len(context) :],
                turned(k, c["rope_theta"]),
            )
            k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
            seen = torch.ones(size, len(both), dtype=torch.bool)
            if c.get("is_causal"):
                seen = seen.tril(len(context))
            y = (
                F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), attn_mask=seen)
                .transpose(0, 1)
                .flatten(1)
            )
            x = x + F.linear(y, w[f"{p}.self_attn.o_proj.weight"])
            m = rms(x, w[f"{p}.post_attention_layernorm.weight"], eps)
            gate, up = (F.linear(m, w[f"{p}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{p}.mlp.down_proj.weight"])
        y = rms(x, w["norm.weight"], eps)
        y = y if c.get("sample_from_anchor", c["kind"] == "DSpark") else y[1:]
        result, s = [], torch.zeros(c.get("markov_rank", 0))
        for k in range(K):
            logits = F.linear(y[k], self.lm_head)
            if c["kind"] == "DSpark" and c["markov_rank"]:
                before = w["markov_head.markov_w1.weight"][result[-1] if result else anchor]
                if c["markov_head_type"] == "gated":
                    join = F.linear(
                        torch.cat((y[k], before)), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"]
                    )
                    before = join.sigmoid() * before
                elif c["markov_head_type"] == "rnn":
                    z = torch.cat((s, before, y[k]))
                    a, b, o = F.linear(z, w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"]).chunk(3)
                    s = a.sigmoid() * s + (1 - a.sigmoid()) * b.tanh()
                    before = o.tanh()
                logits = logits + F.linear(before, w["markov_head.markov_w2.weight"])
            best = int(logits.argmax())
            result.append(best + int(self.w["d2t"][best]) if "d2t" in self.w else best)
        return result


class Mtp:
    """layer: transformers' own decoder layer, filled with the head's. call(layer, x): runs it over rows x (rows, H)."""

    def __init__(self, tensors, names, eps, layer, call, embed, lm_head, one=False, hidden_first=False, zero_first=False):
        self.w, self.names, self.eps, self.one = {n: t.float() for n, t in tensors.items()}, names, eps, one
        self.layer, self.call, self.embed, self.lm_head = copy.deepcopy(layer).float(), call, embed, lm_head
        self.hidden_first, self.zero_first = hidden_first, zero_first

    def __call__(self, ids, states, K):
        h, drafts, logits = states[0], [], []
        e_norm, h_norm, project, last = (self.w[f"{n}.weight"] for n in self.names)
        for _ in range(K):
            e = self.embed[ids]
            if self.zero_first:
                e = torch.cat((torch.zeros_like(e[:1]), e[1:]))
            pair = (rms(e, e_norm, self.eps, self.one), rms(h, h_norm, self.eps, self.one))
            x = F.linear(torch.cat(pair[::-1] if self.hidden_first else pair, -1), project)
            y = rms(self.call(self.layer, x), last, self.eps, self.one)
            logits.append(F.linear(y[-1], self.lm_head))
            drafts.append(int(logits[-1].argmax()))
            ids, h = torch.cat((ids, torch.tensor([drafts[-1]]))), torch.cat((h, y[-1:]))
        return drafts, torch.stack(logits)
