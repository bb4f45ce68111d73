"""Calibration runs layers of families other than Llama one by one: each gets the arguments that it gets inside its model."""

import json
import shutil

import pytest
import torch
from checkpoints import write_byte_tokenizer
from tokenizers import Tokenizer

from lowq_cli.calibrate import mixed, texts
from lowq_cli.files.source import open_source
from lowq_cli.hf.layers import DecoderLayers, run
from lowq_cli.hf.skeleton import build
from lowq_cli.hf.structure import roles
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run import pipeline
from lowq_packers.errors import UnsupportedError, UsageError

CPU = torch.device("cpu")
SMALL = {"vocab_size": 160, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GPT = {"vocab_size": 160, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
SCAN = SMALL | {"num_hidden_layers": 2, "state_size": 4, "time_step_rank": 16}
FAMILIES = {
    "bloom": {
        "vocab_size": 160,
        "hidden_size": 32,
        "n_layer": 4,
        "n_head": 4,
    },  # takes each layer's out[0]
    "gptj": GPT | {"n_positions": 64, "rotary_dim": 4},
    "gpt2": GPT | {"n_positions": 24},
    "deepseek_v3": SMALL | HEADS | EXPERTS | MLA | {"num_hidden_layers": 3},  # routed by a bias that is a buffer
    "opt": SMALL | {"word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": SCAN,
    "falcon_mamba": SCAN | {"tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Family name -> folder with a tiny random model, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(family):
        folder = tmp_path_factory.mktemp(family) / "m"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-1, 1)
        model.save_pretrained(folder)
        return write_byte_tokenizer(folder)

    return make


@pytest.fixture
def text(tmp_path):
    """4,345 tokens of bytes, which are eight windows of 512."""
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 55)
    return str(path)


@pytest.mark.parametrize("family", ["bloom", "gptj", "deepseek_v3"])
def test_layers_run_one_by_one_give_the_models_logits(family, dense):
    from transformers import AutoModelForCausalLM

    folder = dense(family)
    ids = torch.randint(160, (4, 24), generator=torch.Generator().manual_seed(1))
    with open_source(folder) as source:
        blocks = DecoderLayers(source, CPU)
        hidden, others = blocks.start(ids, 2)
        for number in range(len(blocks)):
            with torch.no_grad(), blocks.layer(number) as layer:
                hidden = [run(layer, h, others[number]) for h in hidden]
        with torch.no_grad(), blocks.tail() as logits:
            result = torch.cat([logits(i, h) for i, h in zip(ids.split(2), hidden, strict=True)])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(result.as_subclass(torch.Tensor), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_a_buffer_routes_to_are_calibrated(method, dense, text, tmp_path):
    result = pipeline.quantize(dense("deepseek_v3"), tmp_path / "o", bits=4, group=16, method=method, calib=text)
    assert result["quantized_fraction"] > 0.4


def test_windows_are_no_longer_than_the_context(dense, text, tmp_path, own_cache):
    """GPT-2 has no position behind its 24th: longer windows were an IndexError."""
    pipeline.quantize(dense("gpt2"), tmp_path / "o", bits=4, group=16, method="gptq", calib=text)
    pipeline.quantize(dense("gpt2"), tmp_path / "p", bpw=7.5, group=16)


@pytest.mark.parametrize("how", [{"bits": 4, "method": "gptq"}, {"bits": 2, "method": "learn"}, {"bpw": 7.5}], ids=str)
def test_a_text_of_tokens_that_the_model_lacks_is_refused(how, dense, text, tmp_path, own_cache):
    """A tokenizer with tokens added was an IndexError within the embedding."""
    folder = dense("gptj")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["wisdom"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match="token id 160 is not one of the model's ids, 0 to 159"):
        pipeline.quantize(folder, tmp_path / "o", group=16, calib=text, **how)
    assert not (tmp_path / "o" / "config.json").exists()


def test_widths_of_a_projected_embedding_are_chosen_by_its_weights(dense, tmp_path, own_cache):
    """OPT-350m's is narrower than its layers: its rows were multiplied with gradients of another width."""
    with open_source(dense("opt")) as source:
        _, result = mixed.resolve(source, make_recipe(bpw=7.5, group=16), texts.Text.read(None), CPU)
    assert "is projected before the first layer" in result.why_not_nats
    assert result.bpw <= 7.5


def test_a_linear_that_its_layer_does_not_call_is_quantized_without_the_text(dense, text, tmp_path):
    """FalconMamba multiplies by a dense dt_proj's weight in its own code; the run ended with "damaged file" before."""
    pipeline.quantize(dense("falcon_mamba"), tmp_path / "o", bits=4, group=16, method="gptq", calib=text)
    report = json.loads((tmp_path / "o" / "lowq_report.json").read_text())
    mine = [t for t in report["tensors"] if t["name"].endswith("dt_proj")]
    assert len(mine) == 2
    assert all("its layer does not call it" in t["note"] for t in mine)


def test_weights_that_a_model_reads_itself_are_kept(dense):
    """Packed words in their place are a matrix of another shape, and a dtype that activations must not be cast to."""
    for family, name, why in (
        ("mamba", "backbone.layers.0.mixer.dt_proj.weight", "multiplies by the weight itself"),
        ("falcon_mamba", "lm_head.weight", "casts to the weight's dtype"),
    ):
        with open_source(dense(family)) as source:
            role_of = roles(source.config, source.headers)
            assert not role_of[name].parts
            assert why in role_of[name].reason
            assert role_of["backbone.layers.0.mixer.in_proj.weight"].parts
            with pytest.raises(UsageError, match="the output head stays as it is, because its model casts"):
                make_plan(source, make_recipe(lm_head=8))
    with open_source(dense("mamba")) as source:  # its head is its embedding, which --bpw would pack
        assert (
            "it is the head too: its model casts" in roles(source.config, source.headers)["backbone.embeddings.weight"].reason
        )


def test_a_quantized_mamba_generates(dense, tmp_path):
    from lowq_cli.hf.load import load_model

    for family in ("mamba", "falcon_mamba"):
        folder = dense(family)
        pipeline.quantize(folder, tmp_path / family, bits=8, group=16, method="rtn")
        ids = torch.arange(3, 19)[None]
        with open_source(folder) as a, open_source(tmp_path / family) as b, torch.no_grad():
            expected, result = (load_model(s, "cpu")(input_ids=ids).logits.float() for s in (a, b))
        assert (result - expected).norm() < 0.02 * expected.norm()


def test_layers_that_need_their_model_are_unsupported_not_a_bug(dense, text, tmp_path, monkeypatch):
    from transformers.models.bloom.modeling_bloom import BloomBlock

    def broken(*_, **__):
        raise ValueError("not enough values\nto unpack")

    monkeypatch.setattr(BloomBlock, "forward", broken)
    with pytest.raises(UnsupportedError, match=r"BloomBlock cannot .* \(not enough values to unpack\); use --method lsq"):
        pipeline.quantize(dense("bloom"), tmp_path / "o", bits=4, group=16, method="gptq", calib=text)


def test_infinities_as_transformers_writes_them_are_read(dense, tmp_path):
    """{"__float__": "Infinity"}: every Mamba 2 that transformers 5 saved was «no mamba2 model»."""
    folder = shutil.copytree(dense("mamba"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    model = build(config | {"time_step_floor": {"__float__": "Infinity"}})
    assert model.config.time_step_floor == float("inf")
