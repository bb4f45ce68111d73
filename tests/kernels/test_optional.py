"""A missing library is None; a missing module of our own, or of a library's, is a bug and raised."""

import sys

import pytest

from lowq_kernels.optional import optional


def test_a_module_that_is_there():
    assert optional("lowq_kernels.gptq.round_block", "triton") is sys.modules["lowq_kernels.gptq.round_block"]


def test_only_the_named_library_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wants_a_library.py").write_text("import no_such_library.part\n")
    assert optional("wants_a_library", "no_such_library") is None
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        optional("wants_a_library", "triton")
    with pytest.raises(ModuleNotFoundError, match=r"lowq_kernels\.no_such_file"):
        optional("lowq_kernels.no_such_file", "triton")


def test_the_sets_for_a_gpu_are_found_where_triton_is():
    pytest.importorskip("triton")
    from lowq_kernels import decode
    from lowq_kernels.gptq import round_block as columns

    assert columns.implementation("cuda").__name__ == "round_block_triton"
    assert decode.ops("cuda").name == "triton"
