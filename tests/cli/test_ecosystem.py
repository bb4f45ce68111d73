"""A checkpoint in transformers' other classes and processes: bare models, new heads, `dequantize`, no `import lowq`."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import FAMILIES, SCHEMES, write_dense, write_packed
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli.hf.activations import quantized_linears, set_activations
from lowq_cli.hf.embedding import QuantEmbedding
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.modules.joined import JoinedRows
from lowq_packers.errors import DamagedError
from lowq_packers.scheme import Scheme

IDS = torch.tensor([[1, 17, 42, 99, 7, 3, 150, 23, 64, 5]])
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
HEADS = ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")


def outputs(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids)[0].float()


def opened(folder, cls: str = "AutoModelForCausalLM", **how):
    return getattr(transformers, cls).from_pretrained(folder, dtype=torch.float32, **how).eval()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("cls", HEADS)
def test_another_class_of_the_family_loads_its_tensors_and_draws_its_head_at_random(family, cls, family_checkpoints, caplog):
    if cls == "AutoModelForTokenClassification" and family == "gemma3":
        pytest.skip("transformers has no such class for Gemma 3's text models")
    c = family_checkpoints(family)
    transformers.utils.logging.enable_propagation()
    try:
        model, dense = opened(c.packed, cls), opened(c.dequantized, cls)
    finally:
        transformers.utils.logging.disable_propagation()
    new = {n for n, _ in model.named_parameters() if re.search(r"^(score|classifier)\.", n)}
    assert bool(new) == (cls != "AutoModel")
    dense.load_state_dict({n: model.get_parameter(n) for n in new}, strict=False)
    assert all(model.get_parameter(n).requires_grad and model.get_parameter(n).isfinite().all() for n in new)
    assert all(any(n in record.getMessage() for record in caplog.records) for n in new)
    assert torch.allclose(outputs(model), outputs(dense), atol=1e-5)


@pytest.mark.parametrize("cls", HEADS)
def test_a_tensor_that_all_classes_of_a_family_need_must_be_there(cls, family_checkpoints, tmp_path):
    folder = Path(shutil.copytree(family_checkpoints("llama").packed, tmp_path / "less"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedError, match=r"lacks (model\.)?norm\.weight"):
        opened(folder, cls)


SINKS = ("gpt_oss", FAMILIES["mixtral"][1] | {"layer_types": ["sliding_attention", "full_attention"]})


@pytest.mark.parametrize("family", [*FAMILIES, SINKS], ids=[*FAMILIES, "gpt-oss"])
def test_dequantized_in_place_it_is_the_dense_model(family, tmp_path):
    """Also packed embeddings with their tied heads; and it saves as any model does, tensor for tensor."""
    c = write_packed(write_dense(tmp_path / "dense", family), tmp_path, SCHEMES | {"embedding": Scheme(8, 32, "float")})
    model = opened(c.packed).dequantize()
    assert not any(isinstance(m, lowq.QuantLinear | QuantExperts | QuantEmbedding) for m in model.modules())
    assert torch.allclose(outputs(model), outputs(opened(c.dequantized)), atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    saved, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", c.dequantized))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert not hasattr(opened(tmp_path / "saved").config, "quantization_config")


def test_a_model_that_a_decoder_joined_the_layers_of_is_dequantized(family_checkpoints):
    c = family_checkpoints("qwen2")
    model = opened(c.packed)
    from lowq_cli.engine.decoders import decoder_of

    decoder_of(model)
    assert any(isinstance(m, JoinedRows) for m in model.modules())
    assert torch.allclose(outputs(model.dequantize()), outputs(opened(c.dequantized)), atol=1e-5)


@pytest.mark.parametrize("act", ["int8", "fp8"])
def test_layers_that_a_decoder_has_joined_round_their_activations_too(family_checkpoints, act):
    packed = family_checkpoints("qwen2").packed
    from lowq_cli.engine.decoders import decoder_of

    ids, joined = IDS.repeat(1, 20), opened(packed)  # steps, products of up to 128 rows, are exact
    exact, expected = outputs(joined, ids), outputs(set_activations(opened(packed), act), ids)
    decoder_of(joined)
    assert any(isinstance(m, JoinedRows) for m in joined.modules())
    assert torch.allclose(outputs(set_activations(joined, act), ids), expected, atol=1e-5)
    assert not torch.allclose(exact, expected, atol=1e-5)
    assert {m.act for m in quantized_linears(joined)} == {act}


def test_dequantized_in_the_dtype_that_was_asked_for(family_checkpoints):
    model = opened(family_checkpoints("mixtral").packed).dequantize(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert outputs(model).isfinite().all()


@pytest.fixture
def installed(tmp_path):
    """A folder that makes a Python which sees it believe that this tree is installed, entry points and all."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    info = tmp_path / "site" / "lowq-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowq\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info.parent


FIRST = [  # what such a process imports first of transformers, which imports torch before anything else
    "from transformers import AutoModelForCausalLM",
    "import transformers.quantizers.auto",
    "from transformers import AutoConfig",
    "import transformers.modeling_utils",
]
FORKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
sys.modules.update(hqq=None, sklearn=None)  # transformers would import them, which takes 3 s in each fork
import torch
for first in sys.argv[3:]:  # a fork for each: torch takes most of the time
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, first
        continue
    exec(first)
    assert "lowq" not in sys.modules
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    print(type(model.model.layers[0].self_attn.q_proj).__name__, flush=True)
    os._exit(0)
"""


def test_a_process_that_never_imports_lowq_reads_checkpoints(installed, family_checkpoints):
    line = [sys.executable, "-P", "-c", FORKS, str(installed), str(family_checkpoints("llama").packed), *FIRST]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["QuantLinear"] * len(FIRST)), done.stderr[-2000:]
