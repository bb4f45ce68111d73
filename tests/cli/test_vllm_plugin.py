"""The vLLM plugin: which layers it takes, what each tensor-parallel rank holds, and the same products as the whole weight.

Runs against vLLM's own classes where they can be imported, else against tests/cli/vllm_stub.py, which has their interface.
"""

import importlib.util
import sys
import tomllib
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowq_cli.files.quant_config import compact
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

LAYERS = "vllm.model_executor.layers."
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHAPES = {  # hidden, intermediate, heads, key-value heads, head_dim, vocabulary
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-70B": (8192, 28672, 64, 8, 128, 128256),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 128, 152064),
    "Mixtral-8x7B": (4096, 14336, 32, 8, 128, 32000),
}


@pytest.fixture(scope="module")
def vllm():
    """Its modules by their last name; "ranks" sets the tensor-parallel group. The stub goes when the tests are done."""
    before = set(sys.modules)
    real = "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None
    if not real:
        spec = importlib.util.spec_from_file_location("vllm_stub", Path(__file__).with_name("vllm_stub.py"))
        stub = importlib.util.module_from_spec(spec)
        sys.modules["vllm_stub"] = stub
        spec.loader.exec_module(stub)
        stub.install()
    names = ("linear", "vocab_parallel_embedding", "fused_moe", "quantization")
    result = {name: import_module(LAYERS + name) for name in names}
    parameter = import_module("vllm.model_executor.parameter")

    def ranks(rank, size):
        if not real:
            stub.RANK, stub.SIZE = rank, size
            return
        for module in (result["linear"], result["vocab_parallel_embedding"], parameter):
            module.get_tensor_model_parallel_rank = lambda: rank
            module.get_tensor_model_parallel_world_size = lambda: size

    configured = nullcontext
    if real:
        from vllm.config import VllmConfig, set_current_vllm_config

        configured = lambda: set_current_vllm_config(VllmConfig())  # noqa: E731
    yield SimpleNamespace(**result, ranks=ranks, configured=configured)
    if not real:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("vllm", "vllm_stub") or name.startswith("lowq_cli.vllm_plugin"):
                del sys.modules[name]


@pytest.fixture(autouse=True)
def one_rank(vllm):
    vllm.ranks(0, 1)
    with vllm.configured():
        yield
    vllm.ranks(0, 1)


def config_of(schemes, kept=()):
    from lowq_cli.vllm_plugin.config import LowqVllmConfig

    config = LowqVllmConfig.from_config(compact(schemes, kept))
    config.packed_modules_mapping = FUSED
    return config


def random_q(N, K, scheme, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, scheme.levels, (N, K), generator=g, dtype=torch.uint8)
    if scheme.table:
        scales = torch.randint(100, 119, (N, scheme.groups(K)), generator=g, dtype=torch.uint8)
        scales = scales if scheme.scale != "float" else scales.float() / 100
        table = torch.rand(1, scheme.table_width, generator=g) + 0.5 if scheme.table_width else None
        return QuantizedTensor(codes, scales, None, scheme.bits, scheme.group_size, "none", table, scheme.table, scheme.scale)
    scales = torch.rand(N, scheme.groups(K), generator=g) + 0.5
    zeros = torch.randint(0, scheme.levels, scales.shape, generator=g).float() + (0.25 if scheme.zero == "float" else 0)
    return QuantizedTensor(codes, scales, None if scheme.zero == "none" else zeros, scheme.bits, scheme.group_size, scheme.zero)


def load(layer, q, *shard):
    """Load the tensors of one checkpoint matrix as vLLM's model loading does."""
    p = pack(q)
    for leaf, t in (("weight", p.words), ("weight_scale", p.scales), ("weight_zero", p.zeros), ("weight_table", p.table)):
        if t is not None:
            param = getattr(layer, leaf)
            param.weight_loader(param, t, *shard)


def test_it_is_found_by_its_entry_point_and_registers_once_for_all(vllm):
    from lowq_cli.vllm_plugin import register
    from lowq_cli.vllm_plugin.config import LowqVllmConfig

    register()
    register()
    assert "lowq" in vllm.quantization.QUANTIZATION_METHODS
    assert "LowqLinearMethod" in vllm.linear.WEIGHT_LOADER_V2_SUPPORTED, "or vLLM takes its old loaders"
    assert LowqVllmConfig.get_name() == "lowq"
    assert LowqVllmConfig.get_config_filenames() == []
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["vllm.general_plugins"] == {"lowq": "lowq_cli.vllm_plugin:register"}
    assert "lowq_cli.vllm_plugin" in project["tool"]["setuptools"]["packages"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_of_real_shapes(vllm, name, size):
    H, inter, heads, kv, d, V = SHAPES[name]
    scheme, at = Scheme(4, 128, "float"), "model.layers.7."
    named = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
    config = config_of({at + n: scheme for n in [*named, "mlp.down_proj"]} | {"lm_head": Scheme(8, 128, "float")})
    vllm.ranks(size - 1, size)
    L, V_ = vllm.linear, vllm.vocab_parallel_embedding
    how = {"quant_config": config, "params_dtype": torch.bfloat16}
    if heads % size:
        assert (name, size) == ("Qwen2.5-7B", 8)  # 28 heads: vLLM itself refuses the attention
    with torch.device("meta"):
        made = (
            {
                "gate_up": (
                    L.MergedColumnParallelLinear(H, [inter] * 2, False, prefix=at + "mlp.gate_up_proj", **how),
                    2 * inter // size,
                    H,
                ),
                "o": (L.RowParallelLinear(H, H, False, prefix=at + "self_attn.o_proj", **how), H, H // size),
                "head": (V_.ParallelLMHead(V, H, params_dtype=torch.bfloat16, quant_config=config, prefix="lm_head"), None, H),
            }
            if (name, size) != ("Qwen2.5-7B", 8)
            else {}
        )
        if heads % size == 0:
            qkv = L.QKVParallelLinear(H, d, heads, kv, False, prefix=at + "self_attn.qkv_proj", **how)
            made["qkv"] = qkv, (heads // size + 2 * max(1, kv // size)) * d, H
        if (name, size) == ("Qwen2.5-7B", 8):
            with pytest.raises(
                UnsupportedError, match=r"down_proj: K=18944 over 8 ranks is 2368, .*--override 'down_proj=4:64'"
            ):
                L.RowParallelLinear(inter, H, False, prefix=at + "mlp.down_proj", **how)
        else:
            made["down"] = L.RowParallelLinear(inter, H, False, prefix=at + "mlp.down_proj", **how), H, inter // size
    for layer, N, K in made.values():
        bits = layer.quant_method.scheme.bits
        N = layer.weight.shape[0] if N is None else N
        assert tuple(layer.weight.shape) == (N, K * bits // 32)
        assert tuple(layer.weight_scale.shape) == tuple(layer.weight_zero.shape) == (N, K // 128)
        assert (layer.lowq.N, layer.lowq.K, layer.lowq.scheme.group_size) == (N, K, 128)
        assert layer.weight_scale.dtype == torch.bfloat16


NVFP4 = Scheme.of(4, 16, "e2m1/e4m3")
CASES = [Scheme(4, 32, "float"), Scheme(3, 16, "int"), Scheme(2, 64, "none"), Scheme(1, 16, "float"), Scheme(8, 256, "int"),
         NVFP4, Scheme.of(4, 32, "e2m1/e8m0"), Scheme.of(4, 64, "nf4"), Scheme.of(3, 16, "fitted")]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scheme", CASES, ids=str)
def test_the_ranks_together_compute_the_whole_product(vllm, scheme, size):
    if scheme.bits == 3 and size == 4:
        size = 2  # 64 codes of 3 bits are whole words, and a group of 16; 64 is K / 4
    K, d, heads, kv = 256, 32, 8, 2
    at, x = "model.layers.0.", torch.randn(5, K, generator=torch.Generator().manual_seed(3))
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "one"]
    config = config_of({at + n: scheme for n in names})
    rows = {"q": heads * d, "k": kv * d, "v": kv * d}
    parts = {
        n: random_q(N, K, scheme, i) for i, (n, N) in enumerate({**rows, "gate": 96, "up": 96, "down": 64, "one": 128}.items())
    }
    dense = {n: x @ q.dequantize().T for n, q in parts.items()}
    L, how = vllm.linear, {"quant_config": config, "params_dtype": torch.float32}
    result = {n: [] for n in parts}
    for rank in range(size):
        vllm.ranks(rank, size)
        qkv = L.QKVParallelLinear(K, d, heads, kv, False, prefix=at + "self_attn.qkv_proj", **how)
        gate_up = L.MergedColumnParallelLinear(K, [96, 96], False, prefix=at + "mlp.gate_up_proj", **how)
        down = L.RowParallelLinear(K, 64, False, prefix=at + "mlp.down_proj", reduce_results=False, **how)
        one = L.ColumnParallelLinear(K, 128, False, prefix=at + "one", **how)
        for n in rows:
            load(qkv, parts[n], n)
        load(gate_up, parts["gate"], 0)
        load(gate_up, parts["up"], 1)
        load(down, parts["down"])
        load(one, parts["one"])
        for layer in (qkv, gate_up, down, one):
            layer.quant_method.process_weights_after_loading(layer)
        own_kv = max(1, kv // size) * d
        outs = qkv(x)[0].split([heads * d // size, own_kv, own_kv], -1)
        for n, y in zip("qkv", outs, strict=True):
            result[n].append(y)
        for n, y in zip(("gate", "up"), gate_up(x)[0].chunk(2, -1), strict=True):
            result[n].append(y)
        own = K // size
        result["down"].append(down(x[:, rank * own : (rank + 1) * own])[0])
        result["one"].append(one(x)[0])
    for n, ys in result.items():
        replicas = max(1, size // kv) if n in "kv" else 1
        y = sum(ys) if n == "down" else torch.cat(ys[::replicas], -1)
        assert torch.allclose(y, dense[n], rtol=1e-4, atol=1e-4 * dense[n].abs().max().item()), n


def test_a_wrong_word_shows(vllm):
    scheme, K = Scheme(4, 32, "float"), 64
    q, x = random_q(32, K, scheme), torch.ones(1, K)
    config = config_of({"one": scheme})
    layer = vllm.linear.ColumnParallelLinear(K, 32, False, prefix="one", quant_config=config, params_dtype=torch.float32)
    load(layer, q)
    layer.weight.data[3, 1] ^= 1
    layer.quant_method.process_weights_after_loading(layer)
    wrong = (layer(x)[0] - x @ q.dequantize().T).abs() > 1e-2
    assert wrong.sum() == 1
    assert wrong[0, 3]


def test_fused_parts_must_agree_and_dense_ones_stay_dense(vllm):
    a, b, at = Scheme(4, 32, "none"), Scheme(8, 32, "none"), "model.layers.0.mlp."
    mixed = config_of({at + "gate_proj": a, at + "up_proj": b})
    with pytest.raises(UnsupportedError, match=r"gate_up_proj, but its parts are gate_proj 4-bit g32 .*up_proj 8-bit"):
        vllm.linear.MergedColumnParallelLinear(64, [32, 32], False, prefix=at + "gate_up_proj", quant_config=mixed)
    half = config_of({at + "gate_proj": a}, [at + "up_proj"])
    with pytest.raises(UnsupportedError, match="up_proj dense"):
        vllm.linear.MergedColumnParallelLinear(64, [32, 32], False, prefix=at + "gate_up_proj", quant_config=half)
    other = vllm.linear.RowParallelLinear(64, 32, False, prefix=at + "down_proj", quant_config=half)
    assert type(other.quant_method).__name__ == "UnquantizedLinearMethod"


def test_other_layouts_and_malformed_configs_are_refused(vllm):
    config = config_of({"one": Scheme(4, 64, "float")})
    config.config["schemes"]["w4g64"]["layout"] = "tile"
    with pytest.raises(UnsupportedError, match="one is stored in layout tile"):
        config.get_quant_method(vllm.linear.RowParallelLinear.__new__(vllm.linear.RowParallelLinear), "one")
    from lowq_cli.vllm_plugin.config import LowqVllmConfig

    with pytest.raises(DamagedError):
        LowqVllmConfig.from_config({"quant_method": "lowq", "version": 1, "schemes": {}, "tensors": {"a": "none such"}})
    with pytest.raises(UnsupportedError, match="version"):
        LowqVllmConfig.from_config({"quant_method": "lowq", "version": 99})


def test_names_are_mapped(vllm):
    config = config_of({"model.language_model.layers.0.one": Scheme(4, 64, "float")})
    swap = SimpleNamespace(
        apply_dict=lambda d: {k.replace("model.language_model", "language_model.model"): v for k, v in d.items()}
    )
    config.apply_vllm_mapper(swap)
    assert config.scheme("x", ["language_model.model.layers.0.one"]) == Scheme(4, 64, "float")
    assert config.scheme("x", ["model.language_model.layers.0.one"]) is None


def test_invalid_scales_are_refused(vllm):
    scheme = Scheme(4, 32, "int")
    config = config_of({"one": scheme})
    for leaf, value in (("weight_scale", float("nan")), ("weight_zero", 16.0), ("weight_zero", 0.5)):
        layer = vllm.linear.ColumnParallelLinear(64, 32, False, prefix="one", quant_config=config, params_dtype=torch.float32)
        load(layer, random_q(32, 64, scheme))
        getattr(layer, leaf).data[1, 1] = value
        with pytest.raises(DamagedError, match="one holds scales, zeros"):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_and_tables(vllm, size, tied):
    scheme, V, K = Scheme(4, 32, "float"), 100, 64
    q = random_q(V, K, scheme)
    names = {"model.embed_tokens": scheme} | ({} if tied else {"lm_head": scheme})
    config = config_of(names)
    config.maybe_update_config("folder", SimpleNamespace(tie_word_embeddings=tied))
    x, logits, ids = torch.randn(3, K), [], torch.tensor([[0, 31, 63]])
    for rank in range(size):
        vllm.ranks(rank, size)
        how = {"params_dtype": torch.float32, "quant_config": config}
        table = vllm.vocab_parallel_embedding.VocabParallelEmbedding(V, K, prefix="model.embed_tokens", **how)
        head = vllm.vocab_parallel_embedding.ParallelLMHead(V, K, prefix="lm_head", **how)
        load(table, q)
        if tied:
            assert head.tie_weights(table) is head
            assert not list(head.parameters()), "its products are the table's"
        else:
            load(head, q)
        for layer in (head, table):
            layer.quant_method.process_weights_after_loading(layer)
        if rank == 0:
            rows = table.quant_method.embedding(table, ids)
            assert torch.equal(rows, q.dequantize()[ids])
        logits.append(head.quant_method.apply(head, x))
    whole = torch.cat(logits, -1)
    assert torch.allclose(whole[:, :V], x @ q.dequantize().T, rtol=1e-4, atol=1e-3)
    assert (whole[:, V:] == 0).all(), "rows that pad the vocabulary"


@pytest.mark.parametrize("size", [1, 2])
def test_tables_and_heads_of_classes_that_pass_no_config(vllm, size, monkeypatch):
    """As vLLM's Gemma and Mamba 2 make them: the config in force is asked, for the table of the checkpoint's shape alone."""
    from vllm.config import get_current_vllm_config

    from lowq_cli.vllm_plugin import register

    register()
    scheme, V, K = Scheme(8, 32, "float"), 100, 64
    q, x, logits = random_q(V, K, scheme), torch.randn(3, K), []
    config = config_of({"transformer.wte": scheme})
    config.maybe_update_config("folder", SimpleNamespace(tie_word_embeddings=True, vocab_size=V, hidden_size=K))
    V_, how = vllm.vocab_parallel_embedding, {"params_dtype": torch.float32}
    monkeypatch.setattr(get_current_vllm_config(), "quant_config", config)
    for rank in range(size):
        vllm.ranks(rank, size)
        table, positions = V_.VocabParallelEmbedding(V, K, **how), V_.VocabParallelEmbedding(64, K, **how)
        head = V_.ParallelLMHead(V, K, prefix="lm_head", **how)
        assert type(positions.quant_method) in (type(None), getattr(V_, "UnquantizedEmbeddingMethod", None))
        load(table, q)
        for layer in (table, head):
            layer.quant_method.process_weights_after_loading(layer)
        logits.append(head.tie_weights(table).quant_method.apply(head, x))
    whole = torch.cat(logits, -1)[:, :V]
    assert torch.allclose(whole, x @ q.dequantize().T, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(get_current_vllm_config(), "quant_config", None)
    other = V_.VocabParallelEmbedding(V, K, **how)
    assert not hasattr(other, "lowq"), "another model of the process"


@pytest.mark.parametrize("stored", ["rows", "transposed"])
def test_words_that_vllm_transposes_are_turned_back(vllm, stored):
    scheme, K = Scheme(4, 32, "float"), 64
    q, x = random_q(32, K, scheme), torch.randn(2, K)
    config = config_of({"h.0.attn.c_proj": scheme})
    how = {"quant_config": config, "params_dtype": torch.float32}
    layer = vllm.linear.ColumnParallelLinear(K, 32, False, prefix="h.0.attn.c_proj", **how)
    load(layer, q)
    if stored == "transposed":
        layer.weight.data.zero_()
        layer.weight.weight_loader(layer.weight, pack(q).words.t())
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.allclose(layer(x)[0], x @ q.dequantize().T, rtol=1e-4, atol=1e-3)


def test_the_names_of_a_layers_parts(vllm):
    """vLLM's name of a layer, and those that the checkpoint has for it."""
    scheme = Scheme(4, 32, "float")
    config = config_of(dict.fromkeys(("l.0.mlp.gate_up_proj", "l.0.mamba.in_proj", "s.q_proj", "s.k_proj", "s.v_proj"), scheme))
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    for name in ("l.0.mlp.gate_up_proj", "l.0.mixer.in_proj", "s.qkv_proj"):
        layer = vllm.linear.ColumnParallelLinear.__new__(vllm.linear.ColumnParallelLinear)
        assert config.get_quant_method(layer, name).scheme == scheme, name
    assert not hasattr(config.get_quant_method(layer, "l.0.mlp.down_proj"), "scheme")


def test_a_dense_head_is_left_to_vllm(vllm):
    config = config_of({"model.layers.0.one": Scheme(4, 32, "float")}, ["lm_head"])
    head = vllm.vocab_parallel_embedding.ParallelLMHead.__new__(vllm.vocab_parallel_embedding.ParallelLMHead)
    assert config.get_quant_method(head, "lm_head") is None


class Moe(SimpleNamespace):
    """The facts that vLLM's FusedMoEConfig holds and the plugin or the loaders ask for."""


def experts_layer(vllm, config, prefix, E, H, inter, rank, size):
    """A RoutedExperts without its __init__, which wants a whole engine: only its loader is used."""
    layer = vllm.fused_moe.RoutedExperts.__new__(vllm.fused_moe.RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.global_num_experts, layer.quant_config = E, None
    parallel = SimpleNamespace(tp_size=size)
    layer.moe_config = Moe(
        tp_size=size, tp_rank=rank, intermediate_size=inter, intermediate_size_per_partition=inter // size, has_bias=False,
        is_act_and_mul=True, tp_shard_with_padding=False, moe_parallel_config=parallel, num_logical_experts=E,
        experts_per_token=2,
    )  # fmt: skip
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda e: e, num_fused_shared_experts=0)
    layer._fused_shared_expert_quantizer = None
    layer._expert_map, layer.rocm_aiter_fmoe_enabled = None, False
    if not isinstance(getattr(type(layer), "expert_map", None), property):
        layer.expert_map = None
    layer.activation, layer.apply_router_weight_on_input = SimpleNamespace(value="silu"), False
    layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
    layer.quant_method = config.get_quant_method(layer, prefix)
    return layer


def load_expert(layer, e, shard, q):
    p, weight = pack(q), "w2" if shard == "w2" else "w13"
    for leaf, t in (("weight", p.words), ("weight_scale", p.scales), ("weight_zero", p.zeros), ("weight_table", p.table)):
        if t is not None:
            param = getattr(layer, f"{weight}_{leaf}")
            assert param.weight_loader(param, t, f"experts.{weight}_{leaf}", shard, e, True)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("up", "down"), [(Scheme(4, 32, "float"),) * 2, (Scheme(2, 64, "none"), Scheme(8, 128, "int")), (NVFP4,) * 2], ids=str
)
def test_experts_of_all_ranks_sum_to_the_mixture(vllm, size, up, down):
    E, H, inter, top_k, prefix = 4, 64, 128, 2, "model.layers.1.block_sparse_moe.experts"
    names = ("w1", "w2", "w3")
    config = config_of({f"{prefix}.{e}.{n}": down if n == "w2" else up for e in range(E) for n in names})
    q = {(e, n): random_q(H if n == "w2" else inter, inter if n == "w2" else H, down if n == "w2" else up, 10 * e + i)
         for e in range(E) for i, n in enumerate(names)}  # fmt: skip
    x, g = torch.randn(7, H) / 8, torch.Generator().manual_seed(1)
    weights = torch.rand(7, top_k, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(7)]).to(torch.int32)
    y = 0
    for rank in range(size):
        layer = experts_layer(vllm, config, prefix, E, H, inter, rank, size)
        method = layer.quant_method
        assert method.maybe_roundup_sizes(H, inter // size, torch.bfloat16, None) == (H, inter // size)
        assert method.get_fused_moe_quant_config(layer) is None
        method.create_weights(layer=layer, num_experts=E, hidden_size=H, intermediate_size_per_partition=inter // size,
                              params_dtype=torch.float32, weight_loader=layer.weight_loader, global_num_experts=E)  # fmt: skip
        for (e, n), matrix in q.items():
            load_expert(layer, e, n, matrix)
        method.process_weights_after_loading(layer)
        y = y + method.apply(layer, x, weights, ids, None, None)
    expected = torch.zeros(7, H)
    for t in range(7):
        for w, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, value = (x[t] @ q[e, n].dequantize().T for n in ("w1", "w3"))
            expected[t] += w * ((torch.nn.functional.silu(gate) * value) @ q[e, "w2"].dequantize().T)
    assert torch.allclose(y, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_experts_that_it_cannot_take_are_refused(vllm):
    prefix, s = "model.layers.0.mlp.experts", Scheme(4, 64, "none")
    three = ("gate_proj", "up_proj", "down_proj")
    whole = config_of({f"{prefix}.{e}.{n}": s for e in range(2) for n in three})
    layer = experts_layer(vllm, whole, prefix, 2, 64, 192, 0, 2)
    with pytest.raises(UnsupportedError, match=r"w2: K=192 over 2 ranks is 96, not a multiple of group_size=64"):
        layer.quant_method.create_weights(layer, 2, 64, 96, torch.bfloat16, weight_loader=None)
    mixed = {f"{prefix}.{e}.{n}": s for e in range(2) for n in three} | {f"{prefix}.1.up_proj": Scheme(8, 64, "none")}
    with pytest.raises(UnsupportedError, match="give them one scheme"):
        experts_layer(vllm, config_of(mixed), prefix, 2, 64, 64, 0, 1)
    half = {f"{prefix}.{e}.{n}": s for e in range(2) for n in three[:2]}
    with pytest.raises(UnsupportedError, match="all of an expert's weights packed, or none"):
        experts_layer(vllm, config_of(half, [f"{prefix}.{e}.down_proj" for e in range(2)]), prefix, 2, 64, 64, 0, 1)
    layer = experts_layer(vllm, whole, prefix, 2, 64, 64, 0, 1)
    layer.moe_config.has_bias = True
    with pytest.raises(UnsupportedError, match="biases"):
        whole.get_quant_method(layer, prefix)
