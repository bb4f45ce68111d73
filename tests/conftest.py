"""Where no GPU is, Triton kernels run in Triton's interpreter, which must be switched on before triton is imported.

Commands under test remember their last checkpoint in a folder of their own, not as yours.
"""

import contextlib
import gc
import os
import sys
import tempfile

import torch


def pytest_addoption(parser):
    parser.addoption("--hostile-pictures", type=int, default=400, help="Mutated pictures that are read (tests/serving).")


gc.disable()  # a million objects come to stay while tests are collected: 7 of 21 s went into looking for garbage in them


def pytest_collection_finish():
    """What is there now is no garbage later: each collection took 0.5 s, and a server makes one whenever it unloads a model."""
    gc.freeze()
    gc.enable()


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        import interpreter

        interpreter.speed_up()
# bytecode is kept, as it is for users: each of some hundred processes would compile lowq's sources anew, which takes 1.3 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_state = tempfile.TemporaryDirectory(prefix="lowq-tests-")
os.environ["XDG_STATE_HOME"] = _state.name
