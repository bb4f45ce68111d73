"""Opening a model: accepted names, and refusals with their ways out."""

import errno
import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowq_cli.files import source as source_module
from lowq_cli.files.safetensors_io import TensorHeader, build_header, parse_header, read_header
from lowq_cli.files.source import open_source
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_headers_and_values_agree_with_the_safetensors_library(folder):
    with open_source(folder) as source:
        assert source.params == sum(t.numel() for t in TENSORS.values())
        for name, t in TENSORS.items():
            header = source.headers[name]
            assert (header.shape, header.nbytes) == (tuple(t.shape), t.numel() * t.element_size())
            if t.dtype != torch.bool:
                assert torch.equal(source.read(name).reshape(t.shape), t)
        assert source.read("a.weight", 4, 4).tolist() == [4.0, 5.0, 6.0, 7.0]
        assert source.read_raw("mask", 1, 2) == b"\x00\x01"


def test_build_header_writes_files_that_the_library_reads(tmp_path):
    headers = {"odd": TensorHeader((3,), "U8"), "w": TensorHeader((2, 3), "I32"), "s": TensorHeader((3, 1), "BF16")}
    first, placed = build_header(headers.items())
    data = bytearray(max(h.offset + h.nbytes for h in placed.values()) - len(first))
    values = {"w": torch.arange(6, dtype=torch.int32).reshape(2, 3), "odd": torch.tensor([7, 8, 9], dtype=torch.uint8)}
    values["s"] = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.bfloat16)
    for name, t in values.items():
        at = placed[name].offset - len(first)
        data[at : at + placed[name].nbytes] = t.view(torch.uint8).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(first + data)
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[n], t) for n, t in values.items())
    assert {n: h.offset for n, h in read_header(tmp_path / "x.safetensors").tensors.items()} == {
        n: h.offset for n, h in placed.items()
    }


def header_bytes(**tensors):
    return json.dumps(tensors).encode()


OK = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("raw", "data", "message"),
    [
        (b"\xff{}", 0, "valid JSON"),
        (b"[1]", 0, "JSON object"),
        (b"{" * 5000, 0, "valid JSON"),
        (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": 1}', 8, "'a' occurs twice"),
        (header_bytes(a={**OK, "dtype": "F31"}), 8, "dtype 'F31'"),
        (header_bytes(a={**OK, "dtype": ["F32"]}), 8, "dtype"),
        (header_bytes(a={**OK, "shape": [-2]}), 8, "are impossible"),
        (header_bytes(a={**OK, "shape": [2.0]}), 8, "are impossible"),
        (header_bytes(a={**OK, "shape": [True]}), 8, "are impossible"),
        (header_bytes(a={**OK, "shape": [1 << 61, 1 << 61]}), 8, "but has 8"),
        (header_bytes(a={**OK, "shape": [3]}), 8, "12 bytes but has 8"),
        (header_bytes(a={**OK, "data_offsets": [8, 0]}), 8, "are impossible"),
        (header_bytes(a={**OK, "data_offsets": [0]}), 8, "are impossible"),
        (header_bytes(a={**OK, "data_offsets": [-8, 0]}), 8, "are impossible"),
        (header_bytes(a={**OK, "data_offsets": [0, True]}), 8, "are impossible"),
        (header_bytes(a={**OK, "data_offsets": [1 << 63, (1 << 63) + 8]}), 8, "are impossible"),
        (header_bytes(a={**OK, "data_offsets": [1 << 61, (1 << 61) + 8]}), 8, "truncated or padded"),
        (header_bytes(a=OK, b=OK), 8, "overlaps"),
        (header_bytes(a=OK, b={"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}), 8, "overlaps"),
        (header_bytes(a={"dtype": "F32"}), 8, "exactly dtype, shape"),
        (header_bytes(a=OK, b={**OK, "data_offsets": [4, 12]}), 12, "overlaps"),
        (header_bytes(a=OK, b={**OK, "data_offsets": [12, 20]}), 20, "leaves a gap"),
        (header_bytes(a=OK), 7, "truncated or padded"),
        (header_bytes(a=OK), 9, "truncated or padded"),
        (header_bytes(a={**OK, "data_offsets": [4, 12]}), 12, "truncated or padded"),
        (header_bytes(__metadata__={"a": 1}), 0, "table of strings"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(raw, data, message):
    with pytest.raises(DamagedError, match=message):
        parse_header(raw, data, 8 + len(raw), "x.safetensors")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 63])
def test_a_header_length_out_of_bounds_is_refused(tmp_path, length):
    (tmp_path / "x").write_bytes(struct.pack("<Q", length) + b"{}" * 20)
    with pytest.raises(DamagedError, match="says its header has"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("place", [-1, -40_000])
def test_any_change_of_a_weight_file_changes_the_identity(folder, place):
    path = folder / "model.safetensors"
    save_file({"a.weight": torch.zeros(1 << 18)}, path)
    with open_source(folder) as source:
        before = source.identity
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with open_source(folder) as source:
        assert source.identity != before


def shard(folder, **files):
    (folder / "model.safetensors").unlink()
    for file, names in files.items():
        save_file({n: TENSORS[n] for n in names}, folder / f"{file}.safetensors")


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", ""])
def test_an_index_names_no_file_outside_its_folder(folder, name):
    shard(folder, one=["a.weight", "b.weight", "mask"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
    with pytest.raises(DamagedError, match="only files in the same folder"):
        open_source(folder)


def test_a_file_cut_short_after_its_header_was_read_is_not_mapped(folder):
    path = folder / "model.safetensors"
    with open_source(folder) as source:
        os.truncate(path, path.stat().st_size - 1)
        for use in (lambda: source.mapped(["a.weight"]), lambda: source.read("a.weight"), lambda: source.opened(path.name)):
            with pytest.raises(DamagedError, match="when its header was read"):
                use()


def test_an_index_must_agree_with_its_files(folder):
    shard(folder, one=["a.weight"], two=["b.weight", "mask"])
    index = folder / "model.safetensors.index.json"

    def listed(**where):
        index.write_text(json.dumps({"weight_map": {k.replace("__", "."): f"{v}.safetensors" for k, v in where.items()}}))

    listed(a__weight="one", b__weight="two", mask="two")
    with open_source(folder) as source:
        assert list(source.headers) == ["a.weight", "b.weight", "mask"]
    for where, message in [
        ({"a__weight": "one", "b__weight": "one", "mask": "two"}, "b.weight in one.safetensors, but it is in two"),
        ({"a__weight": "one", "c__weight": "two"}, "it is in no file"),
        ({"a__weight": "one", "b__weight": "three"}, "three.safetensors, which is not"),
        ({"a__weight": "../one"}, "only files in the same folder"),
    ]:
        listed(**where)
        with pytest.raises(DamagedError, match=message):
            open_source(folder)
    index.write_text('{"weight_map": []}')
    with pytest.raises(DamagedError, match="no weight_map"):
        open_source(folder)
    index.unlink()
    with pytest.raises(DamagedError, match="2 safetensors files and no"):
        open_source(folder)


def test_a_tensor_in_two_files_is_refused(folder):
    shard(folder, one=["a.weight"], two=["b.weight", "a.weight"])
    where = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(DamagedError, match=r"a\.weight is in one\.safetensors and in two"):
        open_source(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.ckpt"])
def test_pickles_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError, match=r"pickle.*save_pretrained"):
            open_source(path)


def test_a_weight_file_stands_for_its_folder(folder):
    with open_source(folder / "model.safetensors") as source:
        assert source.folder == folder


@pytest.mark.parametrize("name", ["demo-lowq-4b-g46", "./demo-lowq-4b-g46", "models/demo-lowq-4b-g46"])
def test_a_mistyped_folder_suggests_its_neighbour_without_network(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = (tmp_path / name).parent / "demo-lowq-4b-g64"
    there.mkdir(parents=True)
    (there / "config.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"did you mean (\./|models/)?demo-lowq-4b-g64\?"):
        open_source(name)
    with pytest.raises(NotFoundError, match="did you mean"):
        source_module.check_there(name)


def test_a_mistyped_demo_is_answered_without_the_network():
    """It waited for the hub, then blamed the network."""
    with pytest.raises(NotFoundError, match="did you mean demo\\?"):
        source_module.check_there("dmo")


@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, None])
def test_errors_of_this_machine_are_not_reported_as_an_unreachable_hub(monkeypatch, headers_only, code):
    import huggingface_hub

    why = MemoryError() if code is None else OSError(code, os.strerror(code), "/cache/x")

    def fails(*_, local_files_only=False, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("not cached") if local_files_only else why

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(type(why)) as caught:
        open_source("org/name", headers_only)
    assert caught.value is why
