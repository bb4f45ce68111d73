"""lowq inspect: right numbers for lowq and dense folders; bad folders give one line and the documented exit code."""

import json

import pytest
import torch
from safetensors.torch import save_file

from lowq_cli import main
from lowq_cli.files.quant_config import compact
from lowq_cli.interop.inspection import inspect_model, kind_of
from lowq_kernels.dispatch import tuning_file
from lowq_packers.bitstream import pack
from lowq_packers.errors import DamagedError
from lowq_packers.scheme import Scheme

NAME = "model.layers.0.mlp.up_proj"


def write(folder, tensors, config, report=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if report is not None:
        (folder / "lowq_report.json").write_text(json.dumps(report))
    return folder


def lowq_folder(folder, scheme=None, N=48, K=128, **changes):
    scheme = scheme or Scheme(4, 64)
    G = scheme.groups(K)
    tensors = {
        f"{NAME}.weight": pack(torch.zeros(N, K, dtype=torch.uint8), scheme.bits),
        f"{NAME}.weight_scale": torch.ones(N, G, dtype=torch.bfloat16),
        f"{NAME}.weight_zero": torch.ones(N, G, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.zeros(16, 32, dtype=torch.bfloat16),
    }
    if scheme.zero == "none":
        del tensors[f"{NAME}.weight_zero"]
    tensors |= changes
    tensors = {name: t for name, t in tensors.items() if t is not None}
    config = {"quantization_config": compact({NAME: scheme}, ["model.embed_tokens"])}
    report = {"tensors": [{"name": NAME, "kind": "mlp", "shape": [N, K], "rel_error": 0.125, "crc32": [0]}]}
    return write(folder, tensors, config, report)


def cli(capsys, *args):
    code = main.main(["inspect", *map(str, args)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(3, 32, "none"), Scheme(1, 128, "int"), Scheme(8, 128)], ids=str)
def test_a_lowq_folder(tmp_path, scheme):
    report = inspect_model(str(lowq_folder(tmp_path / "m", scheme)))
    meta = (1 if scheme.zero == "none" else 2) * 48 * scheme.groups(128) * 2
    assert report.format == "lowq"
    assert report.bytes == 48 * 128 * scheme.bits // 8 + meta + 1024
    assert report.bpw == pytest.approx(8 * report.bytes / (48 * 128 + 512))
    assert report.quantized_bpw == pytest.approx(scheme.bits_per_weight())
    assert report.histogram == {scheme.bits: 48 * 128, 16: 512}
    row = next(r for r in report.rows if r.name == NAME)
    assert (row.shape, row.scheme, row.rel_error, row.kind) == ((48, 128), str(scheme), 0.125, "mlp")


def test_rounded_activations_are_a_note(tmp_path):
    folder = lowq_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert inspect_model(str(folder)).notes == ()
    config["quantization_config"]["activations"] = "int8"
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect_model(str(folder)).notes == ("linear layers round their inputs to int8 while running",)


def test_json_has_the_promised_keys(tmp_path, capsys):
    code, out, _ = cli(capsys, lowq_folder(tmp_path / "m"), "--json")
    result = json.loads(out)
    assert code == 0
    assert {"format", "bpw", "bytes", "tensors"} <= result.keys()
    assert [t["name"] for t in result["tensors"]] == [NAME, "model.embed_tokens.weight"]
    assert result["bits"] == {"4": 6144, "16": 512}


def test_the_demo_is_dense(capsys):
    code, out, _ = cli(capsys, "demo")
    assert code == 0
    assert "demo: dense, llama, 6,819,072 weights" in out
    assert "16.000 bits per weight" in out


def test_tuned_gpus_are_named(tmp_path):
    folder = lowq_folder(tmp_path / "m")
    tuning_file.write_file(folder / tuning_file.FILE, tuning_file.Machine("NVIDIA H100", (9, 0), "2.7.1", "3.3.1"), [])
    tuning_file.write_file(folder / tuning_file.FILE, tuning_file.Machine("NVIDIA H100", (9, 0), "2.8.0", "3.4.0"), [])
    assert inspect_model(str(folder)).tuned == ("NVIDIA H100",)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "machines": [{"gpu": 7}]}'])
def test_a_damaged_tuning_file_is_a_note_and_the_rest_is_shown(content, tmp_path):
    folder = lowq_folder(tmp_path / "m")
    (folder / tuning_file.FILE).write_text(content)
    report = inspect_model(str(folder))
    assert report.tuned == ()
    assert any(n.startswith("ignoring ") and tuning_file.FILE in n for n in report.notes)


BAD = {
    "no scales": ({f"{NAME}.weight_scale": None}, "weight_scale is missing"),
    "no zeros": ({f"{NAME}.weight_zero": None}, "weight_zero is missing"),
    "fewer rows of zeros": ({f"{NAME}.weight_zero": torch.ones(47, 2)}, "weight_zero is .* needs"),
    "too few words": ({f"{NAME}.weight": torch.zeros(48, 15, dtype=torch.int32)}, r"is I32 \(48, 15\)"),
    "floats for words": ({f"{NAME}.weight": torch.zeros(48, 16)}, "needs I32"),
    "no weight": ({f"{NAME}.weight": None}, "which the checkpoint does not hold"),
}


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_contradict_the_scheme_are_damage(tmp_path, case):
    changes, message = BAD[case]
    with pytest.raises(DamagedError, match=message):
        inspect_model(str(lowq_folder(tmp_path / "m", **changes)))


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _no_config(folder):
    (folder / "config.json").unlink()


def _unfinished(folder):
    _no_config(folder)
    (folder / "lowq-journal.jsonl").write_text("{}\n")


def _newer(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 99
    (folder / "config.json").write_text(json.dumps(config))


def _pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _report_is_a_list(folder):
    (folder / "lowq_report.json").write_text("[]")


FOLDERS = [
    (_truncate, 3, "truncated"),
    (_no_config, 3, "config.json"),
    (_unfinished, 3, "has not finished"),
    (_newer, 5, "upgrade lowq"),
    (_pickle, 5, "pickle"),
    (_report_is_a_list, 3, "JSON object"),
]


@pytest.mark.parametrize(("spoil", "exit_code", "message"), FOLDERS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_bad_folder_is_one_line(tmp_path, capsys, spoil, exit_code, message):
    folder = lowq_folder(tmp_path / "m")
    spoil(folder)
    code, out, err = cli(capsys, folder)
    assert (code, out) == (exit_code, "")
    assert err.count("\n") == 1
    assert message in err


def test_a_folder_that_is_not_there(tmp_path, capsys):
    code, _, err = cli(capsys, tmp_path / "nothing")
    assert code == 3
    assert "no folder" in err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens", "embedding"),
        ("lm_head", "head"),
        ("model.layers.0.post_attention_layernorm", "norm"),
        ("model.layers.0.block_sparse_moe.gate", "router"),
        ("model.layers.0.mlp.experts.3.up_proj", "expert"),
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.layers.0.mlp.gate_proj", "mlp"),
        ("transformer.h.0.ln_1", "norm"),
    ],
)
def test_classes_by_name(name, kind):
    assert kind_of(name) == kind
