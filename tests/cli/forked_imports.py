"""What a process of `forking` has imported before it is forked: other packages, and nothing of lowq."""

import contextlib
import gc
import importlib
import sys

from lowq_cli import hf

gc.disable()
hf.leave_out()  # as the command line does it
for name in [n for n in sys.modules if n.partition(".")[0].startswith("lowq")]:
    del sys.modules[name]  # a process may read another copy of lowq
for name in ("pytest", "typer", "torch", "transformers.modeling_utils", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)  # pytest: each child imports what its parent was started with
for name in ("prometheus_client", "starlette.applications", "uvicorn"):
    with contextlib.suppress(ImportError):  # an extra
        importlib.import_module(name)
gc.enable()
gc.freeze()  # a child looks for garbage among its own objects
