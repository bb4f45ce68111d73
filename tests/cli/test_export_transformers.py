"""transformers does with an export in compressed-tensors what `inspect` says."""

import pytest
import torch
from exported import HEAD, INT4, SYM

from lowq_cli.interop.exporter import export
from lowq_cli.interop.inspection import inspect_model
from lowq_packers.scheme import Scheme

CASES = {
    "one group": (INT4, True),
    "two groups, widths": (INT4 | {"mlp": Scheme(8, 32, "int")}, False),
    "two groups, the head": (INT4 | HEAD, False),
    "symmetric, two groups": (SYM | HEAD, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_transformers_loads_the_checkpoints_that_inspect_promises(case, family, family_checkpoints, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors (extra test)")
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    schemes, promised = CASES[case]
    if family == "llama-tied" and "head" in case:
        pytest.skip("a tied head has no codes of its own")
    folders = family_checkpoints(family, "bfloat16", schemes)
    export(folders.packed, "compressed-tensors", tmp_path / "out")
    report = inspect_model(str(tmp_path / "out"))
    assert any("transformers" in engine for engine in report.engines) == promised
    asymmetric = any(note.startswith("asymmetric: transformers") for note in report.notes)
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    if not promised:
        assert any("transformers 5.23 does not load it" in note for note in report.notes)
        for how in ({}, {"quantization_config": CompressedTensorsConfig(dequantize=True)}):
            with pytest.raises(RuntimeError):
                AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how)
        return
    ids = torch.tensor([[5, 9, 17]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **more)(ids).logits.float()
        expected = AutoModelForCausalLM.from_pretrained(folders.dequantized)(ids).logits.float()
    assert torch.allclose(theirs, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))
