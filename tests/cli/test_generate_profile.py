"""--profile: kernels that overlap are counted once, by what they do, and the parts add up to the step."""

import json

import pytest

from lowq_cli.engine import explain, timeline
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.timeline import IDLE, Span, StepPart

PRODUCTS = ["layers.*.qkv", "layers.*.o", "layers.*.gate_up", "layers.*.down", "head"]
LAYER = ["void attend<0, 128>(...)", "tile_mma<4, 2>", "tile_mma<4, 5>", "tile_mma<4, 2>"]  # o and down are one instance
STEP = ["void at::native::indexSelect", "_add_norm_kernel", "tile_mma<4, 0>", *LAYER, "tile_mma<4, 1>", *LAYER]
STEP += ["_add_norm_kernel", "Memset (Device)", "nvjet_sm90", "_best_kernel", "_choose_kernel"]
ROLES = ["layers.*.qkv", "attention", "layers.*.o", "layers.*.gate_up", "layers.*.down"]
ROLES = ["embedding", "norms", *ROLES, *ROLES, "norms", "other", "head", "choice of a token", "choice of a token"]


def test_kernels_are_named_by_their_operation():
    assert timeline.roles(STEP, PRODUCTS) == ROLES
    unfolded = [n for name in STEP for n in ([name, "_add_norm_kernel"] if name == "tile_mma<4, 2>" else [name])]
    assert [r for r in timeline.roles(unfolded, PRODUCTS) if r != "norms"] == [r for r in ROLES if r != "norms"]
    mixture = [n for name in STEP for n in (["_route_kernel", "experts<up>"] if name == "tile_mma<4, 5>" else [name])]
    experts = ["layers.*.experts.gate_up_proj", "layers.*.experts.down_proj"]
    named = timeline.roles(mixture, [*PRODUCTS[:2], *experts, "head"])
    assert [named.count(r) for r in ("layers.*.o", "router", *experts, "head")] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("names", "products"),
    [
        (STEP[:-3], PRODUCTS),  # no head
        ([*STEP, "gemv"], PRODUCTS),  # a product too many
        (STEP, [*PRODUCTS[:-2], "head"]),
        (["gemm", "softmax"], PRODUCTS),
        ([], PRODUCTS),
        (STEP, []),
    ],
)
def test_kernels_that_do_not_fit_keep_their_names(names, products):
    assert timeline.roles(names, products) is None


def test_overlap_is_counted_once_and_the_parts_are_the_step(tmp_path):
    step = [("a", 0, 4), ("b", 3, 9), ("c", 5, 8), ("d", 11, 12)]  # c is hidden by b, 2 us of nothing before d
    events = [{"cat": "kernel", "name": n, "ts": 20 * i + s, "dur": e - s} for i in range(3) for n, s, e in step]
    events += [{"cat": "ac2g", "name": "flow", "ts": 1}, {"name": "no category"}]
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"traceEvents": events[::-1]}))
    result = timeline.spans(file)
    assert result[:2] == [Span("a", 0, 4), Span("b", 3, 9)]
    parts = timeline.parts(result, 3)
    assert parts == [
        StepPart("a", 4, 1),
        StepPart("b", 5, 1),
        StepPart("c", 0, 1),
        StepPart("d", 1, 1),
        StepPart(IDLE, 8 + 2, 0),
    ]
    assert sum(p.us for p in parts) == 20  # from a step's end to the next one's
    uneven = timeline.parts([*result, Span("copy", 60, 61)], 3)  # steps that differ are taken together
    assert [(p.what, p.calls) for p in uneven] == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("copy", 1 / 3), (IDLE, 0)]
    assert timeline.parts([], 3) == [StepPart(IDLE, 0, 0)]


def test_bytes_by_layer_are_those_of_a_step():
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **small, num_attention_heads=4, num_key_value_heads=2)
    ).half()
    decoder = NativeDecoder(model)
    result = explain.bytes_by_layer(model, decoder)
    assert list(result) == PRODUCTS
    assert result["layers.*.gate_up"] == 3 * 2 * 96 * 64 * 2
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert sum(result.values()) + norms + 64 * 2 == explain.bytes_per_token(model, decoder)
