"""Adapters in PEFT's format over a packed base: the texts of the merged model, alone and many at once; what is refused."""

import json

import forking
import pytest
import torch
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli.engine import stream
from lowq_cli.engine.lora import adapt, attach
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import read_adapter
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
TEXT, N = "Once upon a time there was a", 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "packed"
    lowq.quantize("demo", out=folder, bits=4, group=64, method="rtn", device="cpu")
    return folder


def write(folder, seed, rank=4, targets=TARGETS, size=1.0, layers=None, **config):
    """An adapter of random factors for the bundled model."""
    model = lowq.load("demo", device="cpu", dtype=torch.float32)[0]
    g, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(targets) and (layers is None or name.split(".")[2] in layers):
            n, k = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, k, generator=g) / k**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(n, rank, generator=g) * size * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config)
    )
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Four, of other ranks and layers."""
    root = tmp_path_factory.mktemp("adapters")
    return [write(root / f"a{i}", i, rank=(4, 9, 1, 16)[i], layers=None if i else ("0",)) for i in range(4)]


def text_of(model, tokenizer, prompt=TEXT, n=N):
    g = stream(model, tokenizer, prompt, max_new_tokens=n)
    list(g)
    return g.tokens[0]


def merged(packed, adapter):
    """The base's own weights, dense, with an adapter added to them in fp32."""
    model = lowq.load(packed, device="cpu", dtype=torch.float32)[0].dequantize()
    result = read_adapter(adapter)
    for name, (A, B) in result.factors.items():
        model.get_submodule(name).weight.data += B @ A
    return model


@pytest.fixture(scope="module")
def wanted(packed, adapters):
    """The text of each merged model, and of the base."""
    _, tokenizer = ready(packed, "cpu")
    plain = lowq.load(packed, device="cpu", dtype=torch.float32)[0].dequantize()
    return [text_of(m, tokenizer) for m in (plain, *(merged(packed, a) for a in adapters))]


def test_adapters_change_the_text(wanted):
    assert len({tuple(w) for w in wanted}) == len(wanted)


def test_the_text_is_that_of_the_merged_model(packed, adapters, wanted):
    for i, folder in enumerate(adapters):
        model, tokenizer = lowq.load(packed, device="cpu", dtype=torch.float32)
        attach(model, [read_adapter(folder)])
        assert text_of(model, tokenizer) == wanted[i + 1]


def test_the_commands_model_computes_it_in_its_own_precision(packed, adapters):
    """In 16 bits: a text's logits equal the merged model's up to rounding, and another adapter's do not."""
    model, tokenizer = ready(packed, "cpu")
    attach(model, [read_adapter(adapters[3])])
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.inference_mode():
        mine = model(input_ids=ids).logits.float()
        theirs, other = (merged(packed, adapters[i])(input_ids=ids).logits for i in (3, 1))
    assert float((mine - theirs).norm() / theirs.norm()) < 0.03 < float((mine - other).norm() / other.norm())


def test_an_own_forward_is_that_of_the_merged_model(packed, adapters):
    model, tokenizer = lowq.load(packed, device="cpu", dtype=torch.float32, lora=adapters[1])
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.inference_mode():
        mine, theirs = model(input_ids=ids).logits, merged(packed, adapters[1])(input_ids=ids).logits
    assert float((mine - theirs).norm() / theirs.norm()) < 1e-3


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["x"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"adapts mlp\.experts\.gate_up_proj \(target_parameters\)"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ],
    ids=str,
)
def test_adapters_other_than_plain_lora_are_refused(tmp_path, config, line):
    folder = write(tmp_path / "a", 1, layers=("0",), **config)
    with pytest.raises(UnsupportedError, match=line):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"r": 64}, "rank 4, adapter_config.json says 64"),
        ({"rank_pattern": {"q_proj": 8}}, "says 8"),
        ({"lora_alpha": "x"}, "lora_alpha of .* must be a number"),
        ({"lora_alpha": float("nan")}, "must be a number"),
        ({"alpha_pattern": {"q_proj": [1]}}, "must be a number"),
        ({"alpha_pattern": {"(": 1}}, "no pattern"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "repeats too much"),
        ({"rank_pattern": {".*" * 9 + "x": 1}}, "repeats too much"),
        ({"rank_pattern": [8]}, r"adapter_config\.json: rank_pattern must be a table"),
        ({"r": None}, r"adapter_config\.json: r of .* must be a number"),
        ({"lora_alpha": 10**400}, "must be a number"),
        ({"lora_alpha": 9e29, "alpha_pattern": {"q_proj": 1e300}}, "must be a number"),
        ({"use_rslora": "false"}, r"adapter_config\.json: use_rslora must be true or false"),
    ],
    ids=str,
)
def test_an_adapter_whose_scale_cannot_be_known_is_refused(tmp_path, config, line):
    with pytest.raises((DamagedError, UnsupportedError), match=line):
        read_adapter(write(tmp_path / "a", 1, rank=4, layers=("0",), **config))


def test_fields_that_an_adapter_lacks_are_pefts_defaults(tmp_path):
    """A missing lora_alpha had been read as the rank."""
    folders = [write(tmp_path / name, 1, rank=4, layers=("0",), lora_alpha=8) for name in "ab"]
    (folders[1] / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    given, default = (read_adapter(f).factors for f in folders)
    assert all(torch.equal(B, default[name][1]) for name, (_, B) in given.items())
    (folders[1] / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(DamagedError, match=r"rank 4, adapter_config\.json says 8"):
        read_adapter(folders[1])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.int(), "is I32; an adapter holds F64, F32, F16, BF16"),
        (lambda t: t * torch.inf, "numbers that are not finite"),
        (lambda t: t * 1e38, "with which its factors are not finite"),
    ],
)
def test_factors_that_are_no_finite_numbers_are_refused(tmp_path, change, line):
    folder = write(tmp_path / "a", 1, rank=4, layers=("0",), lora_alpha=1e6)
    weights = folder / "adapter_model.safetensors"
    save_file({name: change(t) for name, t in load_file(weights).items()}, weights)
    with pytest.raises((DamagedError, UnsupportedError), match=line):
        read_adapter(folder)


def test_a_rank_may_be_that_of_a_pattern(tmp_path):
    plain = read_adapter(write(tmp_path / "a", 1, rank=4, layers=("0",)))
    other = read_adapter(
        write(tmp_path / "b", 1, rank=4, layers=("0",), r=2, rank_pattern={r"layers\.\d+\.(self_attn|mlp).*": 4})
    )
    assert all(torch.equal(B, other.factors[name][1]) for name, (_, B) in plain.factors.items())


def test_folders_that_hold_no_adapter(tmp_path, packed):
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        read_adapter(packed)
    folder = write(tmp_path / "a", 1, layers=("0",))
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(DamagedError, match="two factors"):
        read_adapter(folder)
    save_file({"base_model.model.lm_head.weight": torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight"):
        read_adapter(folder)


def test_an_adapter_of_another_model_is_refused(tmp_path, packed):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for shape, where, line in (
        ((3, 2), name, "of another model"),
        ((3, 2), name.replace("layers.0", "layers.99"), "layers.99"),
    ):
        save_file(
            {f"{where}.lora_A.weight": torch.ones(2, 5), f"{where}.lora_B.weight": torch.ones(shape)},
            folder / "adapter_model.safetensors",
        )
        model, _ = ready(packed, "cpu")
        with pytest.raises(UnsupportedError, match=line):
            adapt(plan_of(model), [read_adapter(folder)])


def test_scales_are_pefts(tmp_path):
    plain = read_adapter(write(tmp_path / "a", 1, rank=4, layers=("0",)))
    root = read_adapter(write(tmp_path / "b", 1, rank=4, layers=("0",), use_rslora=True))
    own = read_adapter(write(tmp_path / "c", 1, rank=4, layers=("0",), alpha_pattern={"q_proj": 4}))
    q, v = (next(m for m in plain.factors if m.endswith(n)) for n in ("q_proj", "v_proj"))
    assert torch.allclose(root.factors[q][1], plain.factors[q][1] * 2)  # 8 / sqrt(4), not 8 / 4
    assert torch.allclose(own.factors[q][1], plain.factors[q][1] / 2)
    assert torch.allclose(own.factors[v][1], plain.factors[v][1])
    assert len({plain.digest, root.digest, own.digest}) == 3


def test_the_command_computes_with_an_adapter(packed, adapters, tmp_path):
    """One prompt, and many of a file."""

    def run(*args):
        done = forking.lowq("generate", packed, *args, "--device", "cpu", "--max-new-tokens", 6, "--json")
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    (tmp_path / "p.jsonl").write_text(json.dumps(TEXT) + "\n" + json.dumps(TEXT) + "\n")
    plain, own = run("--prompt", TEXT), run("--prompt", TEXT, "--lora", adapters[0])
    assert own["tokens"] != plain["tokens"]
    assert [r["tokens"] for r in run("--prompts", tmp_path / "p.jsonl", "--lora", adapters[0])["results"]] == [
        own["tokens"]
    ] * 2
    assert "adapter_config.json" in run("--prompt", TEXT, "--lora", packed)
