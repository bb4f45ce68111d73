"""llama.cpp's names of the families that lowq writes, and of their tensors."""

from lowq_packers.arch import families

ARCHITECTURES = {name: family.gguf for name, family in families().items() if family.gguf}  # families that lowq writes
CLASSES = {f.gguf: f.gguf_class for f in families().values() if f.gguf_class}  # architectures that lowq reads -> class
TYPES = {f.gguf_class: name for name, f in families().items() if f.gguf_class and not f.text}  # class -> its model_type
PERMUTED = ("llama",)  # architectures whose q and k rows llama.cpp expects in pairs
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
ROUTER = "ffn_gate_inp"
ROUTERS = dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), ROUTER)
