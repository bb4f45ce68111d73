"""Needles in long texts, with every kind of cache: a chain of facts scattered over one, each saying what to look for next.

The model is built by hand: one layer of attention, whose queries, keys and values are three parts of a token's embedding. A
token that seeks i finds the one of key i, wherever that is, and says its value, the token that seeks i + 1. One slot read
wrong, left out or taken for its neighbour ends the chain. Each needle has a decoy: a key near its own, of another value.
Heads are turned as far as the text is long, but in the dims that carry keys.
"""

from types import SimpleNamespace

import pytest
import torch

from lowq_cli.engine import stream
from lowq_cli.engine.native import NativeDecoder
from lowq_kernels.decode import kv

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE, DTYPE = ("cuda", torch.float16) if ON_GPU else ("cpu", torch.float32)
LENGTHS = [16_000, 128_000] if ON_GPU else [6_000]
LINKS, HAY, PART, D = 12, 1000, 64, 128  # needles, kinds of hay, dims of a part of an embedding, dims of a head
NEAR, SURE = 0.8, 40.0  # cosine of a decoy's key and its needle's; score of a key that is the one sought
SEEKS, NEEDLES, DECOYS, HAYS = (1 + torch.arange(n) + before for n, before in
                                ((LINKS + 1, 0), (LINKS, LINKS + 1), (LINKS, 2 * LINKS + 1), (HAY, 3 * LINKS + 1)))  # fmt: skip
TOKENIZER = SimpleNamespace(eos_token_id=None, decode=lambda ids, **kw: " ".join(map(str, ids)))


def unit(n):
    x = torch.randn(n, PART)
    return x / x.norm(dim=1, keepdim=True)


def finder():
    """The model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    H, vocabulary = 3 * PART, int(HAYS[-1]) + 1
    turned = {"rope_type": "default", "rope_theta": 1e12}  # so that the last half of a head's pairs stand still
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": D, "rope_parameters": turned}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    sizes = {"vocab_size": vocabulary, "hidden_size": H, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, max_position_embeddings=1 << 17)).eval()
    ids, others = unit(LINKS + 1), unit(LINKS)
    embedding, head = torch.zeros(vocabulary, 3, PART), torch.zeros(vocabulary, 3, PART)
    embedding[SEEKS, 0] = head[SEEKS, 2] = ids
    embedding[NEEDLES, 1], embedding[NEEDLES, 2] = ids[:-1], ids[1:]
    apart = others - (others * ids[:-1]).sum(1, keepdim=True) * ids[:-1]
    embedding[DECOYS, 1] = NEAR * ids[:-1] + (1 - NEAR**2) ** 0.5 * apart / apart.norm(dim=1, keepdim=True)
    embedding[DECOYS, 2] = ids[torch.arange(LINKS) - 1]
    embedding[HAYS, 1], embedding[HAYS, 2] = unit(HAY), ids[torch.randint(LINKS + 1, (HAY,))]
    still = torch.cat([torch.arange(D // 4, D // 2), torch.arange(3 * D // 4, D)])
    attention, eye = model.model.layers[0].self_attn, torch.eye(PART)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.model.embed_tokens.weight.copy_(embedding.flatten(1))
        model.lm_head.weight.copy_(head.flatten(1))
        model.model.layers[0].input_layernorm.weight.fill_(H**-0.5)  # seekers of length 1, all others of root 2
        model.model.norm.weight.fill_(1)
        attention.q_proj.weight.view(4, D, 3, PART)[:, still, 0] = SURE * (2 * D) ** 0.5 * eye
        attention.k_proj.weight.view(D, 3, PART)[still, 1] = eye
        attention.v_proj.weight.view(D, 3, PART)[:PART, 2] = eye
        attention.o_proj.weight.view(3, PART, 4, D)[2, :, :, :PART] = eye[:, None]
    return model.to(DEVICE, DTYPE)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_needle_is_found(length):
    torch.manual_seed(11)
    model = finder()
    text = HAYS[torch.randint(HAY, (length,))]
    text[torch.randperm(length)[: 2 * LINKS]] = torch.cat([NEEDLES, DECOYS])
    for kind in kv.KINDS:
        decoder = NativeDecoder(model, kv=kind)
        g = stream(model, TOKENIZER, [*text.tolist(), int(SEEKS[0])], max_new_tokens=LINKS, decoder=decoder)
        list(g.pieces())
        assert g.tokens[0] == SEEKS[1:].tolist(), kind
