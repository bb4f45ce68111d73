"""Where no GPU is, Triton kernels run in Triton's interpreter, which must be switched on before triton is imported.

Commands under test remember their last checkpoint, and cache what they generate, in temporary folders, not in yours.
"""

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

import own_tree
import pytest

own_tree.use()
import torch  # noqa: E402  # imports lowq


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="Also the cases marked `more`, which `make test-all` runs.")
    parser.addoption("--hostile-pictures", type=int, default=400, help="Mutated pictures that are read (tests/serving).")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Leave out the cases marked `more`, and mark half of a product so whose every value still meets half of the others."""
    places = {}  # (test, parameter) -> the identity of a value -> its place
    for item in items:
        if half := item.get_closest_marker("half_of"):
            seen = [(places.setdefault((item.function, name), {}), id(item.callspec.params[name])) for name in half.args]
            if sum(values.setdefault(value, len(values)) for values, value in seen) % 2:
                item.add_marker("more")
    more = [] if config.getoption("--all") else [item for item in items if item.get_closest_marker("more")]
    if more:
        left_out = set(more)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=more)


gc.disable()  # a million objects come to stay while tests are collected: 7 of 21 s went into looking for garbage in them


def pytest_collection_finish():
    """Young objects are looked through each 20,000 instead of 700 new ones: 4% less of a file of models."""
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_objects():
    """Collect garbage before each file and ignore what is alive then.

    Otherwise a full collection takes 0.5 to 2 s by the middle of the suite, and a server makes one whenever it unloads a model.
    Eight files took 129 processor seconds with objects frozen after collection alone, and 105 so.
    """
    gc.collect()
    gc.freeze()


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
if "PYTEST_XDIST_WORKER" not in os.environ:  # all processes of a session share one cache
    _cache = Path(_state.name, "cache")
    os.environ["XDG_CACHE_HOME"] = str(_cache)
    (_cache / "lowq").mkdir(mode=0o700, parents=True)
    for kind in ("cpu", "cubin"):  # compiled kernels stay for later sessions: the CPU library takes 15 s
        compiled = own_tree.ROOT / ".pytest_cache" / "d" / "lowq" / kind
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        (_cache / "lowq" / kind).symlink_to(compiled)
# each client of a server reads certificates, the bundled file in 15 ms; no test has a connection that needs one
os.environ["SSL_CERT_DIR"] = _state.name
