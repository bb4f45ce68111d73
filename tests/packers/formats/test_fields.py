"""Every field of every config, edited: the weights stay, or are what the format's own reader makes of it, or it is an error."""

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch

from lowq_packers import formats
from lowq_packers.errors import LowqError
from lowq_packers.formats import check_used
from lowq_packers.qtensor import QuantizedTensor

sys.path.insert(0, str(Path(__file__).parent))
from format_support import NAME, OF_TABLES, WRITERS, fetcher, headers, random_q, written

VALUES = [
    *(None, True, False, 0, 1, 2, 3, 4, 8, 16, 32, 64, 128, -1, 2.5, "", "none", "int", "float", "group", "channel", "tensor"),
    *("block", "gptq", "gptq_v2", "gemm", "gemv", "uint2", "uint4", "uint8", "int32", "false", "e5m2", "frozen", "dense"),
    *("pack-quantized", "int-quantized", "float-quantized", "dynamic", [], [NAME], ["Linear"], ["re:.*"], {}, {"format": "x"}),
]
MEANT = {  # edits after which other weights are right: an own decoder says which
    "gptq": {"checkpoint_format", "format"},
    "humming": {"is_fp_zero_point"},
}
UNKNOWN = {"transform": {"type": "hadamard"}, "permutation": [1, 0], "scale_by": 2.0}


def decoded(tensors, config, shape):
    result = formats.detect(config, headers(tensors))
    if result is None:
        raise LowqError("no format")
    matrices = result.matrices(config, headers(tensors), fetcher(tensors))
    check_used(matrices, headers(tensors))
    if not matrices:
        raise LowqError("nothing is quantized")
    (m,) = matrices
    if m.shape != shape:
        raise LowqError("another shape than config.json says: files.shapes looks at that")
    q = m.read(fetcher(tensors))
    return q.dequantize() if isinstance(q, QuantizedTensor) else q.float()


def paths(table, at=()):
    """Every field of a config, nested ones too, and a few that are not there."""
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))
    yield from ((*at, key) for key in UNKNOWN)


def put(config, path, value):
    config = copy.deepcopy(config)
    table = config
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return config


def cases():
    for fmt in WRITERS:
        for bits, zero in ((4, "none"), (4, "int"), (8, "none"), (2, "int"), (4, "float"), *((4, kind) for kind in OF_TABLES)):
            for group, K in ((32, 64), (64, 64)):
                q = random_q(bits, group, zero, 64, K)
                if fmt.why_not(q.scheme, 64, K):
                    continue
                tensors, config = written(fmt, q)
                yield fmt.name, f"{q.scheme}", tensors, config, (64, K)


def their_decode(name, tensors, config):
    """The format's own reader on an edited config, where one is installed; None where not, or where it refuses."""
    if name != "compressed-tensors":
        return None
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra interop)")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    try:
        parsed = QuantizationConfig.model_validate(config["quantization_config"])
        (group,) = parsed.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        state = {k.removeprefix(f"{NAME}."): t for k, t in tensors.items()}
        return compressor.decompress(state, group)["weight"].float()
    except Exception:
        return None


EDITED = ("quantization_config", "quantization")


@pytest.mark.parametrize("name", [f.name for f in WRITERS if f.name != "gemlite"])
def test_every_edit_of_a_config_is_the_same_weights_or_an_error(name):
    tried = accepted = 0
    for fmt, spelled, tensors, config, shape in cases():
        if fmt != name:
            continue
        original = decoded(tensors, config, shape)
        for section in (s for s in EDITED if s in config):
            for path, value in itertools.product(paths(config[section]), [*VALUES, *UNKNOWN.values()]):
                edited = put(config, (section, *path), value)
                tried += 1
                try:
                    result = decoded(tensors, edited, shape)
                except LowqError:
                    continue
                accepted += 1
                if not torch.equal(result, original) and path[-1] not in MEANT.get(name, ()):
                    theirs = their_decode(name, tensors, edited)
                    same = theirs is not None and torch.equal(result, theirs)
                    assert same, f"{spelled}: {'.'.join(path)}={value!r} changes weights"
    assert tried > 500
    assert 0 < accepted < tried


@pytest.mark.parametrize("name", [f.name for f in WRITERS])
def test_an_unknown_tensor_of_a_module_is_refused(name):
    for fmt, _, tensors, config, shape in cases():
        if fmt == name:
            with pytest.raises(LowqError, match="does not know what it does"):
                decoded({**tensors, f"{NAME}.weight_rotation": torch.zeros(2)}, config, shape)
            decoded({**tensors, f"{NAME}.bias": torch.zeros(64)}, config, shape)


@pytest.mark.parametrize("position", range(12))
def test_every_number_of_gemlites_metadata(position):
    for fmt, spelled, tensors, config, shape in cases():
        if fmt != "gemlite":
            continue
        original = decoded(tensors, config, shape)
        for value in (-1, 0, 1, 2, 3, 4, 7, 8, 15, 16, 32, 64, 128, 255, 1 << 30):
            meta = tensors[f"{NAME}.metadata"].clone()
            if position in (9, 10) and value != meta[position]:
                continue  # other modes are other weights, as GemLite's kernels have it: test_gemlite
            meta[position] = value
            try:
                result = decoded({**tensors, f"{NAME}.metadata": meta}, config, shape)
            except LowqError:
                continue
            assert torch.equal(result, original), f"{spelled}: metadata[{position}]={value} changes weights"


@pytest.mark.parametrize("leaf", ["nbits", "group_size", "axis", "channel_wise", "view_as_float", "quant_scale", "quant_zero"])
def test_every_setting_of_hqqs_tensors_is_read_as_hqq_reads_it_or_refused(leaf):
    hqq = pytest.importorskip("hqq.core.quantize", reason="needs the package hqq")
    for fmt, spelled, tensors, _, shape in cases():
        if fmt != "hqq":
            continue
        for value in (0, 1, 2, 3, 4, 8, 32, 64):
            edited = {**tensors, f"{NAME}.{leaf}": torch.tensor(value, dtype=torch.int32)}
            try:
                result = decoded(edited, {"quantization_config": {"quant_method": "hqq"}}, shape)
            except LowqError:
                continue
            get = lambda k, t=edited: t[f"{NAME}.{k}"]  # noqa: E731
            meta = {
                "nbits": int(get("nbits")), "group_size": int(get("group_size")), "axis": int(get("axis")),
                "shape": torch.Size(get("shape").tolist()), "scale": get("scale").float(), "zero": get("zero").float(),
                "packing": bytes(get("packing").tolist()).decode(), "compute_dtype": torch.float32, "view_as_float": False,
                "unpack_view_dtype": torch.uint8, "quant_scale": False, "quant_zero": False,
            }  # fmt: skip
            theirs = hqq.Quantizer.dequantize(get("W_q"), meta)
            assert torch.allclose(result, theirs, rtol=2e-3, atol=1e-6), f"{spelled}: {leaf}={value}"


def packed():
    return written(formats.get("compressed-tensors"), random_q(4, 32, "int", 64, 64))


@pytest.mark.parametrize("symmetric", [True, "false", None])
def test_zero_points_that_the_config_denies_are_an_error(symmetric):
    tensors, config = packed()
    edited = put(config, ("quantization_config", "config_groups", "group_0", "weights", "symmetric"), symmetric)
    with pytest.raises(LowqError, match="symmetric"):
        decoded(tensors, edited, (64, 64))


@pytest.mark.parametrize("key", ["transform_config", "sparsity_config"])
def test_transforms_and_sparsity_are_refused_and_empty_ones_read(key):
    tensors, config = packed()
    edited = put(config, ("quantization_config", key), {"config_groups": {"R1": 1}, "format": "sparse-24-bitmask"})
    with pytest.raises(LowqError, match=key):
        decoded(tensors, edited, (64, 64))
    for empty in ({}, None, {"config_groups": {}} if key == "transform_config" else {"format": "dense"}):
        decoded(tensors, put(config, ("quantization_config", key), empty), (64, 64))


def unknown_fields(name, read=decoded):
    for fmt, spelled, tensors, config, shape in cases():
        for section in (s for s in EDITED if s in config and fmt == name):
            for key, value in UNKNOWN.items():
                if isinstance(value, dict) and name == "mlx":
                    continue  # the settings of a module of that name, which there is none of
                edited = {s: put(config, (section, key), value)[section] if s in EDITED else v for s, v in config.items()}
                try:
                    read(tensors, edited, shape)
                except LowqError as e:
                    output = str(e)
                else:
                    pytest.fail(f"{spelled}: {key} is not looked at")
                assert key in output


@pytest.mark.parametrize("name", [f.name for f in WRITERS if f.name != "gemlite"])
def test_unknown_fields_are_refused_and_a_reader_that_skips_them_is_found(name):
    unknown_fields(name)

    def skips(tensors, config, shape):
        known = {s: {k: v for k, v in c.items() if k not in UNKNOWN} if s in EDITED else c for s, c in config.items()}
        return decoded(tensors, known, shape)

    with pytest.raises(pytest.fail.Exception, match="is not looked at"):
        unknown_fields(name, skips)
