"""Every kind of GPTQ and AWQ matrix that GPTQModel 7.7 packs, with the config that it writes, decoded as it decodes them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from library_files import decoded, leaves, refused, there_and_back, write

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
pytest.importorskip("gptqmodel", reason="needs the package gptqmodel", exc_type=ImportError)
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

SHAPES = [(64, 128), (64, 160), (32, 96), (40, 90), (24, 32)]  # (N, K)
BUFFERS = ("qweight", "qzeros", "scales", "g_idx")


class Variant(NamedTuple):
    """What GPTQModel packs. order: g_idx is permuted."""

    bits: int
    group: int
    sym: bool
    form: str = "gptq"
    order: bool = False
    words: torch.dtype = torch.int32


GPTQ = [
    Variant(bits, group, sym, form, order)
    for bits in (2, 3, 4, 8)
    for group in (-1, 16, 32, 64, 128)
    for sym in (True, False)
    for form in ("gptq", "gptq_v2")
    for order in (False, True)
]
UNREAD = [(Variant(bits, 32, False, "gptq_p"), "lowq reads gptq and gptq_v2") for bits in (2, 3, 4, 5, 6, 7, 8)]
UNREAD += [(Variant(4, 32, False, words=words), "pack_dtype=.*; lowq reads int32") for words in (torch.int8, torch.int16)]


def layer(v: Variant, N: int, K: int) -> TorchLinear:
    return TorchLinear(
        bits=v.bits, group_size=v.group, desc_act=v.order, sym=v.sym, in_features=K, out_features=N, bias=False,
        pack_dtype=v.words, format=FORMAT(v.form), register_buffers=True,
    )  # fmt: skip


def saved(folder: Path, v: Variant, N: int, K: int) -> torch.Tensor:
    """A folder of what the library packs from random codes, scales and zeros (a fifth of them 0), and what it decodes."""
    g = K if v.group == -1 else v.group
    index = torch.arange(K) // g
    if v.order:
        index = index[torch.randperm(K)]
    G, mid = -(-K // g), 1 << (v.bits - 1)
    scales = (torch.rand(N, G) * 0.01 + 0.01).half().float()
    zeros = torch.full((N, G), mid) if v.sym else torch.randint(0, 1 << v.bits, (N, G))
    if not v.sym:
        zeros[::5] = 0
        zeros[1] = torch.arange(G) % 2  # never one zero for all
    codes = torch.randint(0, 1 << v.bits, (N, K))
    dense = torch.nn.Linear(K, N, bias=False)
    dense.weight.data = (codes - zeros[:, index]) * scales[:, index]
    module = layer(v, N, K)
    module.pack_original(dense, scales.clone(), zeros.float(), index.int())
    config = QuantizeConfig(
        bits=v.bits, group_size=v.group, sym=v.sym, desc_act=v.order, format=FORMAT(v.form), pack_dtype=v.words
    )
    if v.form == "gptq":
        convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=v.bits, pack_dtype=v.words))
    write(folder, {n: getattr(module, n) for n in BUFFERS}, {"dtype": "float16", "quantization_config": config.to_dict()})
    return by_library(folder)


def by_library(folder: Path) -> torch.Tensor:
    """The matrix of a folder as the library decodes it, in fp32, by what config.json says."""
    q, tensors = json.loads((folder / "config.json").read_text())["quantization_config"], leaves(folder)
    words = getattr(torch, q["pack_dtype"])
    v = Variant(q["bits"], q["group_size"], q["sym"], q.get("checkpoint_format", q.get("format")), q["desc_act"], words)
    module = layer(v, tensors["scales"].shape[1], tensors["g_idx"].shape[0])
    for name in BUFFERS:
        setattr(module, name, tensors[name])
    if v.form == "gptq":
        convert_gptq_v1_to_v2_format_module(module, v.bits, words)
    module.scales = module.scales.float()
    module.post_init()
    return module.dequantize_weight().t().float().contiguous()


@pytest.mark.parametrize("v", GPTQ, ids=lambda v: "-".join(map(str, v[:5])))
def test_every_gptq_variant(v, tmp_path):
    torch.manual_seed(v.bits)
    walked = 0
    for N, K in SHAPES:
        if v.bits == 3 and (N % 32 or K % 32):
            continue  # the library packs 3 bits 32 at a time
        folder = tmp_path / f"{N}-{K}"
        expected = saved(folder, v, N, K)
        result = decoded(folder)
        assert torch.equal(result, expected.to(result.dtype)), (N, K)
        held = there_and_back(folder, "gptq", by_library)
        whole = N * v.bits % 32 == 0 and K * v.bits % 32 == 0
        one = v.group == -1 or v.group >= K  # group, which no order changes
        assert held == (whole and (one or (not v.order and K % v.group == 0))), (N, K)
        walked += 1
    assert walked


@pytest.mark.parametrize(("v", "reason"), UNREAD, ids=lambda v: "-".join(map(str, v)) if isinstance(v, Variant) else "")
def test_unsupported_checkpoints_are_refused_with_the_reason(v, reason, tmp_path):
    saved(tmp_path / "m", v, 64, 128)
    refused(tmp_path / "m", reason)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "K"), [(64, 128), (8, 256), (40, 384)])
def test_every_awq_variant(group, dtype, N, K, tmp_path):
    def by_awq(folder: Path) -> torch.Tensor:
        t = {n: x.float() if n == "scales" else x for n, x in leaves(folder).items()}
        return dequantize_gemm(t["qweight"], t["qzeros"], t["scales"], 4, group).t().float().contiguous()

    torch.manual_seed(group)
    scales, zeros = (torch.rand(N, K // group) * 0.01 + 0.01).to(dtype), torch.randint(0, 16, (N, K // group))
    dense, index = torch.nn.Linear(K, N, bias=False), torch.arange(K) // group
    dense.weight.data = (torch.randint(0, 16, (N, K)) - zeros[:, index]) * scales[:, index].float()
    made = AwqTorchLinear(4, group, False, False, K, N, register_buffers=False)
    made.pack(dense, scales, zeros)
    config = QuantizeConfig(bits=4, group_size=group, sym=False, method=METHOD.AWQ, format=FORMAT.GEMM)
    tensors = {n: getattr(made, n) for n in BUFFERS[:3]}
    folder = write(tmp_path / "m", tensors, {"quantization_config": config.to_dict()})
    assert torch.equal(decoded(folder), by_awq(folder).to(dtype))
    assert there_and_back(folder, "awq", by_awq)
