"""Plans: the result for each tensor, to the byte, from headers alone."""

import json
import shutil
from dataclasses import replace

import pytest

from lowq_cli.files import source as source_module
from lowq_cli.files.quant_config import expand
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.interop.foreign import foreign_matrices
from lowq_cli.plan.plan import default_out, output_config
from lowq_cli.plan.planner import assign, make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers._slabs import SLAB
from lowq_cli.run.budget import Budget, make_budget, slab_rows
from lowq_cli.run.pipeline import prepare
from lowq_packers.errors import DoesNotFitError, SchemeError, UnsupportedError, UsageError
from lowq_packers.scheme import Scheme


@pytest.fixture
def plan_of(family_checkpoints):
    """(family, shard size, recipe flags) -> its plan."""

    def make(family="llama", shard_size=2 << 30, **flags):
        with open_source(family_checkpoints(family).dense) as source:
            return make_plan(source, make_recipe(**flags), shard_size)

    return make


def schemes(plan):
    return {i.name: i.scheme for i in plan.items if i.scheme}


# bits of the body, whether the head is the embedding, what the recipe says of it, its bits
HEADS = [
    (4, False, {}, 8),
    (3, False, {}, 8),
    (2, False, {}, 4),
    (8, False, {}, None),
    (4, True, {}, None),
    (4, False, {"lm_head": "auto"}, 8),
]
HEADS += [(4, False, {"lm_head": "keep"}, None), (8, False, {"lm_head": 4}, 4), (4, True, {"lm_head": 8}, 8)]


def test_linear_weights_are_quantized_and_the_rest_kept_with_a_reason(plan_of):
    plan = plan_of(group=32)
    kinds = {i.kind for i in plan.items if i.scheme}
    assert kinds == {"attention", "mlp", "head"}
    assert {i.scheme for i in plan.items if i.scheme and i.kind != "head"} == {Scheme(4, 32)}
    assert {i.note.partition(";")[0] for i in plan.items if not i.scheme} == {"embedding", "norm"}
    assert sum(i.params for i in plan.items) == plan.params == sum(c.params for c in plan.classes)
    assert plan.coverage == sum(i.params for i in plan.items if i.scheme) / plan.params
    kept = plan_of(group=32, lm_head="keep")
    assert {i.note.partition(";")[0] for i in kept.items if not i.scheme} == {"head", "embedding", "norm"}
    assert kept.quantized_bpw == pytest.approx(4 + 2 * 32 / 32)  # fp32 scales and zeros
    assert json.loads(json.dumps(plan.to_json()))["quantized_fraction"] == plan.coverage


@pytest.mark.parametrize(("bits", "tied", "given", "head"), HEADS)
def test_the_head_gets_8_bits_below_a_body_of_4_unless_it_is_the_embedding(plan_of, bits, tied, given, head):
    result = schemes(plan_of("llama-tied" if tied else "llama", bits=bits, group=32, **given))
    zero = (
        "none" if head == 8 and given.get("lm_head", "auto") == "auto" else "float"
    )  # without zeros other engines' files hold it exactly
    assert result.get("lm_head") == (head and Scheme(head, 32, zero))


def test_a_head_keeps_the_zeros_that_its_method_fits(plan_of):
    assert schemes(plan_of(bits=4, group=32, method="hqq"))["lm_head"] == Scheme(8, 32, "float")


def test_the_planned_config_expands_to_the_planned_schemes(plan_of):
    for family in ("llama", "gpt2", "mixtral", "qwen3-moe", "phi3"):
        plan = plan_of(family, group=16, overrides=["layers.0=8", "c_fc=8"][family == "gpt2" :][:1], lm_head=8)
        names = [i.kept_name for i in plan.items]
        assert expand(plan.quantization_config(), names) == schemes(plan), family


def test_overrides_apply_in_order_and_skip_wins(plan_of):
    plan = plan_of(group=32, overrides=["mlp=8:16", "layers.1.mlp.up_proj=2", "q_proj=keep"], skip=["layers.0.mlp.down_proj"])
    result = schemes(plan)
    assert result["model.layers.0.mlp.up_proj"] == Scheme(8, 16)
    assert result["model.layers.1.mlp.up_proj"] == Scheme(2, 32)
    assert result["model.layers.0.self_attn.k_proj"] == Scheme(4, 32)
    assert not {"model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"} & result.keys()
    assert {i.note for i in plan.items if i.name == "model.layers.0.mlp.down_proj.weight"} == {"the recipe keeps it"}


def test_a_group_that_does_not_divide_k_gives_way_and_the_plan_says_so(plan_of):
    plan = plan_of(group=64)  # K = 64 but for down_proj, where it is 96
    assert schemes(plan)["model.layers.0.mlp.down_proj"] == Scheme(4, 48)
    assert plan.notes == ("group 48, because 64 does not divide K=96: model.layers.0.mlp.down_proj and 1 more",)
    assert set(schemes(plan_of(group="channel", lm_head="keep")).values()) == {Scheme(4, 64), Scheme(4, 96)}


def test_a_k_that_no_group_divides_is_kept_unless_per_channel(family_checkpoints):
    """K = 90 is not a multiple of 16."""
    with open_source(family_checkpoints("llama").dense) as source:
        source.config["intermediate_size"] = 90
        for name, h in source.headers.items():
            if ".mlp." in name:
                source.headers[name] = replace(h, shape=tuple(90 if n == 96 else n for n in h.shape))
        plan = make_plan(source, make_recipe(lm_head="keep"))
        assert {n.rpartition(".")[2] for n in schemes(plan)} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
        assert "K=90 is not a multiple of 16, so no group divides it" in plan.notes[0]
        channel = schemes(make_plan(source, make_recipe(group="channel")))
        assert channel["model.layers.0.mlp.down_proj"] == Scheme(4, 90)
        with pytest.raises(SchemeError, match="use 8:channel"):
            make_plan(source, make_recipe(overrides=["down_proj=8"]))


@pytest.mark.parametrize("section", [{}, {"bits": 4}, [], {"quant_method": None}])
def test_a_quantization_config_without_a_method_says_what_to_do(section, family_checkpoints, tmp_path):
    dense = family_checkpoints("llama").dense
    for path in dense.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((dense / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_source(tmp_path) as source:
        for refuse in (foreign_matrices, load_model, lambda source: make_plan(source, make_recipe(), 1 << 30)):
            with pytest.raises(UnsupportedError, match=r"names no quant_method; remove that entry if the weights are plain"):
                refuse(source)


def test_nothing_to_quantize_says_why(family_checkpoints):
    """K = 90 in all layers: the way out is --group channel, which only the hidden plan named before."""
    with open_source(family_checkpoints("llama").dense) as source:
        source.config |= {"intermediate_size": 90, "hidden_size": 90}
        for name, h in source.headers.items():
            source.headers[name] = replace(h, shape=tuple(90 if n in (64, 96) and n != 16 else n for n in h.shape))
        source.config |= {"num_attention_heads": 5, "num_key_value_heads": 2, "head_dim": 18}
        for name, h in source.headers.items():
            if "k_proj" in name or "v_proj" in name:
                source.headers[name] = replace(h, shape=(36, 90))
        with pytest.raises(UnsupportedError, match=r"layers\.0.* is kept \(and 13 more\): K=90 is .*--group channel takes"):
            make_plan(source, make_recipe(lm_head="keep"))


def test_an_override_that_cannot_hold_is_refused(plan_of):
    with pytest.raises(SchemeError, match="group 64 does not divide K=96; use 8:48"):
        plan_of(overrides=["down_proj=8:64"])
    with pytest.raises(SchemeError, match="are one parameter of the model"):
        plan_of("mixtral", overrides=[r"experts\.0\.w1=8"])
    with (
        pytest.raises(SchemeError, match="has none; use --zero float"),
        prepare("demo", make_recipe(method="hqq", zero="none")),
    ):
        pass


def test_a_tied_head_that_no_group_divides_stays_the_embedding(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=True)).save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        plan = make_plan(source, make_recipe(lm_head=8, group=16))
        assert output_config(source, plan)["tie_word_embeddings"]
    assert "lm_head" not in schemes(plan)
    assert "stays the embedding: K=24" in plan.notes[0]


def test_a_tied_head_is_written_separately_only_when_asked(family_checkpoints, plan_of):
    plan = plan_of("llama-tied", group=32)
    assert not plan.untie
    assert "lm_head" not in schemes(plan)
    plan = plan_of("llama-tied", group=32, lm_head=8)
    assert plan.untie
    assert schemes(plan)["lm_head"] == Scheme(8, 32)
    assert any(i.name == "model.embed_tokens.weight" and not i.scheme for i in plan.items)
    assert "no longer tied" in plan.notes[0]
    with open_source(family_checkpoints("llama-tied").dense) as source:
        assert source.config["tie_word_embeddings"] is True
        assert output_config(source, plan)["tie_word_embeddings"] is False
    with pytest.raises(UsageError, match="is quantized already"):
        plan_of("llama-tied", lm_head=8, overrides=["embed_tokens=8"])


def test_a_part_that_the_model_does_not_have_is_refused(plan_of):
    assert plan_of("llama", vision="keep", embedding=4)
    with pytest.raises(UsageError, match=r"vision 4: .* has no vision tower to quantize; leave --vision out"):
        plan_of("llama", vision=4)


def test_low_coverage_is_warned_of(plan_of):
    plan = plan_of(skip=["mlp"])
    assert plan.coverage < 0.6
    assert "% of the weights are quantized; most of the rest is mlp" in plan.warnings[0]
    with pytest.raises(UnsupportedError, match="nothing to quantize"):
        plan_of(skip=["*"])


def test_experts_are_quantized_and_the_router_is_not(plan_of):
    plan = plan_of("mixtral", group=16)
    kinds = {i.name: i for i in plan.items}
    assert kinds["model.layers.1.block_sparse_moe.experts.3.w2"].scheme == Scheme(4, 16)
    assert kinds["model.layers.1.block_sparse_moe.gate.weight"].note == "router"


def test_a_conv1d_is_planned_by_its_transpose(plan_of):
    plan = plan_of("gpt2", group=32)
    item = next(i for i in plan.items if i.name == "transformer.h.0.attn.c_attn")
    assert (item.shape, item.cut.transposed) == ((192, 64), True)


def test_shards_are_filled_in_order_up_to_their_size(plan_of):
    plan = plan_of(group=32, shard_size=40_000)
    assert len(plan.shards) > 2
    assert [i for s in plan.shards for i in s.items] == list(plan.items)
    for shard in plan.shards:
        assert len(shard.items) == 1 or sum(i.nbytes for i in shard.items) <= 40_000
        ends = sorted((h.offset, h.offset + h.nbytes) for h in shard.placed.values())
        assert [e for _, e in ends][:-1] == [b for b, _ in ends][1:]
        assert (ends[0][0], ends[-1][1]) == (len(shard.header), shard.size)
    assert plan_of(group=32).shards[0].name == "model.safetensors"
    with pytest.raises(UsageError, match="must be positive"):
        assign(list(plan.items), 0)


def test_planning_reads_no_weights(family_checkpoints, monkeypatch, tmp_path):
    def touched(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(source_module, "read_bytes", touched)
    dense = family_checkpoints("llama").dense
    with prepare(dense, make_recipe(), tmp_path / "out", headers_only=True) as prepared:
        assert prepared.plan.coverage > 0.5
    assert not (tmp_path / "out").exists()


def test_a_plan_is_the_same_each_time_and_another_for_another_recipe(plan_of):
    prints = [plan_of(**f).fingerprint for f in ({}, {"group": 64}, {"bits": 3}, {"method": "rtn"}, {"shard_size": 40_000})]
    assert prints[0] == prints[1]  # 64 is the default: the same run
    assert len(set(prints)) == 4


def test_scales_have_one_dtype(family_checkpoints, tmp_path):
    def dtypes(folder, **flags):
        with open_source(folder) as source:
            plan = make_plan(source, make_recipe(**flags))
            return {h.dtype for i in plan.items if i.scheme for n, h in i.outputs if not n.endswith(".weight")}

    dense = family_checkpoints("llama").dense
    assert dtypes(dense) == {"F32"}
    assert dtypes(dense, dtype="float16") == {"F16"}
    shutil.copytree(dense, tmp_path / "m")
    config = json.loads((dense / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert dtypes(tmp_path / "m") == {"BF16"}  # what a loader casts them to


def test_memory_and_disk_that_do_not_suffice_are_refused(tmp_path, plan_of):
    enough = Budget(1 << 30, 8 << 30, 1 << 20, 1 << 30, 1.0)
    enough.check(tmp_path)
    with pytest.raises(DoesNotFitError, match=r"needs .* GB of memory, 1\.0 MB are available"):
        Budget(1 << 50, 1 << 20, 0, 1, None).check(tmp_path)
    with pytest.raises(DoesNotFitError, match="GB of disk"):
        Budget(1, 1 << 30, 1 << 40, 1 << 30, None).check(tmp_path)
    import torch

    budget = make_budget(plan_of(), tmp_path / "not" / "there", torch.device("cpu"))
    assert budget.disk_free_bytes > 0
    assert budget.seconds is not None
    assert budget.seconds > 0


def test_memory_for_reading_counts_in_the_memory_estimate(plan_of, tmp_path):
    import torch

    peaks = [make_budget(plan_of(), tmp_path, torch.device("cpu"), held=held).peak_bytes for held in (0, 1 << 30)]
    assert peaks[1] - peaks[0] == pytest.approx(1 << 30, rel=0.1)  # this process grows, too


@pytest.mark.parametrize("K", [16, 48, 2048, 4096, 11008, 1 << 20])
def test_slabs_are_whole_slabs_of_the_quantizers(K):
    for device, size in SLAB.items():
        assert slab_rows(K, device) % max(1, size // K) == 0


def test_the_default_folder_is_named_after_model_and_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert str(default_out("org/Model-7B", make_recipe())) == "Model-7B-lowq-4b-g64"
    assert str(default_out("m/", make_recipe(bits=2, group="channel"))) == "m-lowq-2b-channel"
    unusual = make_recipe(method="gptq", zero="none", lm_head="keep", embedding=8, rotate=True, act="int8")
    assert str(default_out("m", unusual)) == "m-lowq-4b-g64-gptq-sym-head16-emb8-int8-rot"
    assert str(default_out("m", make_recipe(bpw=3.5, method="gptq"))) == "m-lowq-3.5bpw-gptq"
    skipping, other = (str(default_out("m", make_recipe(skip=[s]))) for s in ("layers.0", "layers.1"))
    assert skipping != other
    assert skipping.startswith("m-lowq-4b-g64-")
    assert str(default_out(str(tmp_path / "m"), make_recipe(group=128))) == "m-lowq-4b-g128"


@pytest.mark.parametrize(("group", "named"), [("64", "g64"), ("48", "g32"), ("100000", "g256"), ("channel", "channel")])
def test_a_replaced_group_names_the_folder_by_its_content(group, named):
    from lowq_cli.plan.recipe import make_recipe
    from lowq_cli.run.prepare import prepare

    with prepare("demo", make_recipe(bits=4, group=group), headers_only=True) as prepared:
        assert prepared.out.name == f"demo-lowq-4b-{named}"


@pytest.mark.parametrize(("kind", "said"), [("BertModel", True), ("BertForMaskedLM", True), ("BertLMHeadModel", False)])
def test_a_model_that_generates_no_text_is_said_to(kind, said, tmp_path):
    import transformers

    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=200, is_decoder=True
    )
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "bert")
    with open_source(str(tmp_path / "bert")) as source:
        notes = make_plan(source, make_recipe(None)).notes
    assert any(f"a {kind} does not generate text" in note for note in notes) == said
