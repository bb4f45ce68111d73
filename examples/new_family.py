"""Describe a model family that lowq's decoder does not know yet, and compare its logits with transformers'.

Helium is Llama but for one fact: its rotary embedding pairs neighbouring values. In the tree the lines between the marks are
the file packers/arch/helium.py. Nothing else has to change for the decoder, the server and the kernels to take the family.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowq_cli.engine.decoders import decoder_of
from lowq_packers.arch import Family, common, families
from lowq_packers.arch.parts import Model, Update


# ---- packers/arch/helium.py
def helium(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = common.attention(c, p, bias=c.attention_bias, turned=common.rope(c, pairing="neighbours"))
        return common.pre_norm(c, p, a, common.mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return common.model(c, layer)


FAMILIES = (Family("helium", helium),)
# ----


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("helium", **sizes, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def main() -> None:
    print("before:", decoder_of(tiny()).name)  # transformers' own loop

    families()["helium"] = FAMILIES[0]  # a file in the folder is found by itself
    model = tiny()
    decoder = decoder_of(model)
    print("after: ", decoder.name)  # batches, a paged cache, fused kernels

    ids = torch.randint(1, 320, (1, 11))
    with torch.inference_mode():
        wanted = model(ids).logits
    error = (decoder.logits(ids) - wanted).norm() / wanted.norm()
    print(f"logits differ from transformers' by {error:.1e}")
    assert decoder.name == "native"
    assert error < 1e-5
    del families()["helium"]


if __name__ == "__main__":
    main()
