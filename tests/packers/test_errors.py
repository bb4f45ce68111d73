"""What a library raises becomes a refusal where it speaks of what the person gave, and stays what it is where it does not."""

import errno
import json
import os
import types

import pytest
import torch

from lowq_packers import errors
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError, device_lost, library_errors

HINT = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."  # below every error of a released torch
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def raises(e: BaseException):
    raise e


def module_that_raises(name: str):
    """A function of a module of that name, whose own line fails."""
    made = types.ModuleType(name)
    exec("def calls(f, *args):\n    return f(*args)\n\ndef breaks(*_):\n    return None.field\n", vars(made))
    return made


def through_a_library(f, *args):
    """Call `f` as a library would that we gave it to."""
    return module_that_raises("some_library.hooks").calls(f, *args)


@pytest.mark.parametrize(
    "e", [ValueError("bad value"), KeyError("field"), RuntimeError("shapes"), OSError("no such file"), AttributeError("x")]
)
def test_a_librarys_error_is_a_refusal_and_keeps_its_cause(e):
    refused = library_errors(DamagedError, "the folder cannot be read")
    with pytest.raises(DamagedError, match="the folder cannot be read: ") as caught, refused:
        through_a_library(raises, e)
    assert caught.value.__cause__ is e


@pytest.mark.parametrize(
    "e",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyboardInterrupt(),
        SystemExit(3),
        UsageError("too many bits"),
        RuntimeError(ILLEGAL),
        *(OSError(code, os.strerror(code), "/some/file") for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE)),
    ],
)
def test_errors_not_caused_by_the_file_pass_through(e):
    with pytest.raises(type(e)) as caught, library_errors(DamagedError, "the folder cannot be read"):
        through_a_library(raises, e)
    assert caught.value is e


@pytest.mark.parametrize("package", ["lowq_packers.formats.x", "lowq_kernels.x", "lowq_cli.hf.quantizer"])
def test_a_mistake_of_ours_that_a_library_called_is_not_the_persons(package):
    breaks = module_that_raises(package).breaks
    with pytest.raises(AttributeError), library_errors(DamagedError, "the folder cannot be read"):
        through_a_library(breaks)
    theirs = module_that_raises("lowqish.hooks").breaks
    with pytest.raises(DamagedError), library_errors(DamagedError, "the folder cannot be read"):
        through_a_library(theirs)


def test_errors_out_of_compiled_code_called_by_the_catching_function_are_a_librarys():
    catching = types.ModuleType("lowq_cli.catching")
    exec("def calls(refused, text):\n    with refused:\n        int(text)\n", vars(catching))
    with pytest.raises(DamagedError, match="invalid literal"):
        catching.calls(library_errors(DamagedError, "it is damaged"), "x")


def test_a_missing_library_is_not_a_damaged_file():
    with pytest.raises(UnsupportedError, match="requires sentencepiece"), library_errors(DamagedError, "the tokenizer"):
        through_a_library(raises, ImportError("requires sentencepiece"))


@pytest.mark.parametrize(
    ("e", "lost"),
    [
        (RuntimeError(ILLEGAL), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (UnsupportedError("CUDA driver: launching tile_mma: an illegal instruction was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), False),
        (torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing\n{HINT}"), False),
        (torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{HINT}"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("an illegal memory access"), False),
    ],
)
def test_errors_after_which_a_gpu_answers_no_more(e, lost):
    assert device_lost(e) == lost


def test_an_error_after_which_work_goes_on_is_shown_where_it_is_asked_for(monkeypatch, capsys):
    try:
        json.loads("{")
    except ValueError as e:
        monkeypatch.delenv("LOWQ_DEBUG", raising=False)
        errors.log_error("the file of rates", e)
        assert capsys.readouterr().err == ""
        monkeypatch.setenv("LOWQ_DEBUG", "1")
        errors.log_error("the file of rates", e)
    shown = capsys.readouterr().err
    assert shown.startswith("the file of rates:\nTraceback")
    assert "test_errors.py" in shown
