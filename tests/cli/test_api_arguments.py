"""Arguments of the Python API: what a caller has at hand is taken, and what cannot be is refused in one line."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import lowq


@pytest.fixture(scope="module")
def loaded():
    return lowq.load("demo", device="cpu")


def text_of(loaded, prompt):
    return "".join(lowq.stream(*loaded, prompt, max_new_tokens=4))


def test_linears_of_any_module_are_replaced_by_their_parameters():
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
    original = copy.deepcopy(net)
    for i in (0, 2):
        q = lowq.quantize_tensor(net[i].weight, bits=8, group_size=16, dtype="float32")
        net[i] = lowq.QuantLinear.from_quantized(q, net[i].bias, dtype="float32")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert net[0].dtype == torch.float32
    torch.testing.assert_close(net(x), original(x), atol=0.02, rtol=0.02)


W = torch.ones(32, 64)


@pytest.mark.parametrize(
    ("weight", "settings", "message"),
    [
        (W.numpy(), {}, "must be a torch tensor, not ndarray"),
        (W.to("meta"), {}, "meta device"),
        (W[:, :0], {}, "K = 0"),
        (W.int(), {}, "float"),
        (W, {"bits": "4"}, "bits='4'"),
        (W, {"bits": 4.0}, "bits=4.0"),
        (W, {"bits": True}, "bits=True"),
        (W, {"group_size": "64"}, "group_size='64'"),
        (W, {"dtype": torch.int8}, "use float16, bfloat16 or float32"),
        (W, {"dtype": "half precision"}, "use float16, bfloat16 or float32"),
    ],
)
def test_a_weight_that_cannot_be_quantized_is_refused(weight, settings, message):
    with pytest.raises(lowq.LowqError, match=message):
        lowq.quantize_tensor(weight, **settings)


def test_a_bias_of_another_length_is_refused_before_the_first_product():
    q = lowq.quantize_tensor(torch.randn(32, 64))
    with pytest.raises(lowq.LowqError, match=r"bias must be \(32,\).*got \(3,\)"):
        lowq.QuantLinear.from_quantized(q, torch.zeros(3))


def test_kernels_that_refuse_for_one_reason_are_named_once():
    """A reader of the error looks for the kernels of this device, which come first."""
    layer = lowq.QuantLinear.from_quantized(lowq.quantize_tensor(torch.randn(32, 64)))
    with pytest.raises(lowq.LowqError) as refused:
        layer(torch.ones(2, 64, dtype=torch.float64))
    message = str(refused.value)
    assert message.count("runs on cuda, not on cpu") == 1
    assert message.index("not torch.float64") < message.index("runs on cuda, not on cpu")


def test_token_ids_come_in_lists_tensors_and_arrays(loaded):
    ids = [5, 6, 7]
    expected = text_of(loaded, ids)
    assert text_of(loaded, torch.tensor(ids)) == expected
    assert text_of(loaded, torch.tensor([ids])) == expected
    assert text_of(loaded, torch.tensor(ids).numpy()) == expected
    assert text_of(loaded, [torch.tensor(ids)]) == expected


@pytest.mark.parametrize("prompt", [None, b"Once", [{"role": "user", "content": "Hi"}], 3, [["Once"]], [1.5]], ids=repr)
def test_a_prompt_of_another_kind_is_refused(loaded, prompt):
    with pytest.raises(lowq.LowqError, match="a prompt is a text or token ids, not"):
        lowq.stream(*loaded, prompt, max_new_tokens=4)


@pytest.mark.parametrize("setting", [{"seed": None}, {"draft": None}, {"max_new_tokens": 1.5}, {"batch": 2.0}], ids=repr)
def test_a_setting_of_another_type_is_refused(loaded, setting):
    (name,) = setting
    with pytest.raises(lowq.LowqError, match=f"{name}="):
        lowq.stream(*loaded, "Once", **setting)


def test_a_model_that_is_not_one_is_refused(loaded):
    model, tokenizer = loaded
    for pair in ((tokenizer, model), ("demo", tokenizer), (model, None)):
        with pytest.raises(lowq.LowqError, match=r"lowq\.load"):
            lowq.stream(*pair, "Once")
    for function in (lowq.quantize, lowq.load, lowq.export, lambda m: lowq.perplexity(m, "Once upon a time")):
        for wrong in (None, model):
            with pytest.raises(lowq.LowqError, match="is not a path or a name"):
                function(wrong)


def test_perplexity_reads_a_text_and_not_the_name_of_its_file(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a king. " * 4)
    for name in (tmp_path / "text.txt", str(tmp_path / "text.txt")):
        with pytest.raises(lowq.LowqError, match="name of a file"):
            lowq.perplexity("demo", name)
    long = Path(tmp_path / "text.txt").read_text() * 40  # longer than any name of a file
    assert lowq.perplexity("demo", long, max_tokens=64)["tokens"] == 64


def test_quantize_takes_the_dtype_that_load_takes(tmp_path):
    lowq.quantize("demo", out=tmp_path / "m", method="rtn", dtype=torch.float16)
    assert lowq.load(tmp_path / "m", "cpu", dtype="float16")[0].dtype == torch.float16
    assert '"float16"' in (tmp_path / "m" / "config.json").read_text()
