"""Part of interop.py: other tools' readers, each of which says how many matrices of an export are equal to lowq's."""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lowq
from lowq_cli.files.checkpoint import Checkpoint, CheckpointTensor, open_checkpoint
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, open_foreign

Row = dict[str, Any]
Fetch = Callable[[str], torch.Tensor]  # leaf -> a tensor of one matrix


def judged(
    model: Path, work: Path, to: str, reader: str, same: Callable[[CheckpointTensor, Fetch, Path], bool], **recipe: Any
) -> Row:
    """Quantize, export `to`, and count the matrices of which `same` says that the reader sees our weights."""
    folder = Path(tempfile.mkdtemp(dir=work))
    lowq.quantize(model, out=folder / "ours", method="rtn", **recipe)
    out = folder / ("x.gguf" if to == "gguf" else "x")
    export(folder / "ours", to, out)
    found = open_checkpoint(folder / "ours")
    packed = [t for t in found.tensors if t.scheme]
    if to == "gguf":
        equal = sum(same(t, lambda leaf: torch.empty(0), out) for t in packed)
    else:
        with open_foreign(out) as source:
            fetch = fetcher(source)
            equal = sum(same(t, lambda leaf, t=t: fetch(f"{t.name}.{leaf}"), out) for t in packed)  # type: ignore[misc]
    shutil.rmtree(folder)
    return {"format": to, "reader": reader, **recipe, "matrices": len(packed), "equal": equal}


def gptqmodel_rows(model: Path, work: Path) -> Iterator[Row]:
    """GPTQModel's torch backend dequantizes every matrix; version 1 (symmetric) after its own conversion to version 2."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    for bits in (8, 4, 3, 2):
        for zero in ("none", "int"):

            def same(t: CheckpointTensor, fetch: Fetch, out: Path, bits: int = bits, zero: str = zero) -> bool:
                N, K = t.shape
                layer = TorchLinear(bits, 64, zero == "none", False, K, N, format=FORMAT.GPTQ_V2)
                for leaf in ("qweight", "qzeros", "scales", "g_idx"):
                    getattr(layer, leaf).copy_(fetch(leaf))
                config = json.loads((out / "config.json").read_text())["quantization_config"]
                if config["checkpoint_format"] == "gptq":
                    convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
                layer.post_init()
                return torch.equal(layer.dequantize_weight().t(), _ours(t, out).half())  # theirs multiplies in fp16

            recipe = {"bits": bits, "group": 64, "zero": zero, "dtype": "float16", "lm_head": "keep"}
            yield judged(model, work, "gptq", "gptqmodel (torch)", same, **recipe)


def awq_rows(model: Path, work: Path) -> Iterator[Row]:
    """AutoAWQ's own unpacking of every matrix: codes, zeros and scales."""
    theirs = _file_of("awq", "utils/packing_utils.py")

    def same(t: CheckpointTensor, fetch: Fetch, out: Path) -> bool:
        codes, zeros = theirs.unpack_awq(fetch("qweight"), fetch("qzeros"), 4)
        codes, zeros = theirs.reverse_awq_order(codes, zeros, 4)
        codes, zeros, scales = (codes & 15).t().float(), (zeros & 15).t().float(), fetch("scales").t().float()
        g = codes.shape[1] // scales.shape[1]
        w = (codes - zeros.repeat_interleave(g, 1)) * scales.repeat_interleave(g, 1)
        return torch.equal(w, _ours(t, out))

    yield judged(model, work, "awq", "AutoAWQ", same, bits=4, group=64, zero="int", dtype="float16", lm_head="keep")


def compressed_tensors_rows(model: Path, work: Path) -> Iterator[Row]:
    """compressed-tensors' own unpacking of every matrix with zeros: the rows with logits have none."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    for bits in (8, 4, 3, 2, 1):

        def same(t: CheckpointTensor, fetch: Fetch, out: Path, bits: int = bits) -> bool:
            (N, K), scales = t.shape, fetch("weight_scale").float()
            codes = unpack_from_int32(fetch("weight_packed"), bits, torch.Size([N, K])).float()
            zeros = unpack_from_int32(fetch("weight_zero_point"), bits, torch.Size(scales.shape), packed_dim=0).float()
            g = K // scales.shape[1]
            return torch.equal((codes - zeros.repeat_interleave(g, 1)) * scales.repeat_interleave(g, 1), _ours(t, out))

        yield judged(
            model, work, "compressed-tensors", "compressed-tensors", same, bits=bits, group=64, zero="int", lm_head="keep"
        )


def humming_rows(model: Path, work: Path) -> Iterator[Row]:
    """humming-kernels says which tensors it expects for our config: shapes and dtypes of every matrix."""
    from humming.schema import BaseWeightSchema

    for bits in (8, 4, 3, 2, 1):

        def same(t: CheckpointTensor, fetch: Fetch, out: Path) -> bool:
            config = json.loads((out / "config.json").read_text())["quantization_config"]
            wanted = BaseWeightSchema.from_config(config).get_tensors_attrs(*t.shape, torch.float16)
            return all(tuple(fetch(n).shape) == tuple(e["shape"]) and fetch(n).dtype == e["dtype"] for n, e in wanted.items())

        recipe = {"bits": bits, "group": 64, "zero": "float", "dtype": "float16", "lm_head": "keep"}
        yield judged(model, work, "humming", "humming-kernels (schema)", same, **recipe)


def gguf_rows(model: Path, work: Path) -> Iterator[Row]:
    """The gguf package finds and dequantizes every matrix."""
    from gguf import GGUFReader, quants

    from lowq_packers.formats.gguf import permute_heads

    config = json.loads((model / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}

    def same(t: CheckpointTensor, fetch: Fetch, out: Path) -> bool:
        _, _, layer, _, leaf = t.name.split(".")
        wanted = f"blk.{layer}.{names.get(leaf, 'ffn_' + leaf.removesuffix('_proj'))}.weight"
        theirs = next(x for x in GGUFReader(out).tensors if x.name == wanted)
        w = torch.from_numpy(quants.dequantize(theirs.data, theirs.tensor_type).copy())
        return torch.equal(permute_heads(w, heads[leaf], inverse=True) if leaf in heads else w, _ours(t, out))

    for bits in (8, 4):
        yield judged(model, work, "gguf", "gguf", same, bits=bits, group=32, zero="none", dtype="float16", lm_head="keep")


def mlx_lm_rows(work: Path) -> Iterator[Row]:
    """mlx-lm runs tiny random mixtures, whose experts MLX stacks: the largest difference of a logit from fp32 transformers."""
    import mlx.core as mx
    from mlx_lm.utils import load_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    more = {"llama": {}, "mixtral": {"num_local_experts": 4}, "olmoe": {"num_experts": 4}}
    more |= {f: {"num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1} for f in ("qwen2_moe", "qwen3_moe")}
    for family, facts in more.items():
        torch.manual_seed(0)
        folder = Path(tempfile.mkdtemp(dir=work))
        config = AutoConfig.for_model(family, **sizes, **facts, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "dense")
        lowq.quantize(folder / "dense", folder / "ours", bits=4, group=32, zero="none", method="rtn", lm_head="keep")
        export(folder / "ours", "mlx", folder / "x")
        found = open_checkpoint(folder / "ours")
        state = {f"{t.name}.weight" if t.scheme else t.name: _values(found, t).contiguous() for t in found.tensors}
        save_file(state, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
        ids = torch.randint(0, 128, (1, 48), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            ours = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()(ids).logits
        mx.set_default_device(mx.cpu)
        theirs = torch.tensor(load_model(folder / "x")[0](mx.array(ids.tolist())).astype(mx.float32).tolist())
        row = {"format": "mlx", "reader": "mlx-lm", "family": family, "bits": 4, "group": 32, "zero": "none"}
        yield row | {"largest_logit_difference": (theirs - ours).abs().max().item(), "largest_logit": ours.abs().max().item()}


def _values(found: Checkpoint, t: CheckpointTensor) -> torch.Tensor:
    """A tensor's weights in fp32."""
    return found.read_matrix(t).dequantize() if t.scheme else found.source.read(t.name).reshape(t.shape).float()


def _ours(t: CheckpointTensor, out: Path) -> torch.Tensor:
    """The weights for `t` of the lowq checkpoint that was exported."""
    return open_checkpoint(out.parent / "ours").read_matrix(t).dequantize()


def _file_of(package: str, path: str) -> ModuleType:
    """One file of a package, without importing the package: AutoAWQ wants data sets and models."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(found.submodule_search_locations[0]) / path)
    assert spec is not None
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
