"""The only place that imports transformers: reading model structure, loading lowq checkpoints.

`register` makes transformers know the quant_method "lowq" without importing it: `import lowq` takes no torch and no
transformers (1 ms instead of several seconds), and the quantizer is there as soon as transformers is.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = ("hqq", "sklearn")  # transformers imports these where they are installed: 2.7 s with inductor, 0.7 s with scipy
QUANTIZERS = "transformers.quantizers.auto"  # the module that holds transformers' table of quantizers
AFTER = {  # a module of theirs -> ours that registers lowq there
    QUANTIZERS: "lowq_cli.hf.quantizer",
    "transformers.modeling_utils": "lowq_cli.hf.quantizer",  # comes after; for a `register` called while QUANTIZERS runs
    "peft.tuners.lora.model": "lowq_cli.hf.lora",
}


def _ready(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _AfterImport:  # not a MetaPathFinder: importlib.abc alone would double the time that `import lowq` takes
    """Lets the real finders find the modules of AFTER, and has ours imported once they have run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in AFTER:
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for s in found if s is not None), None)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if name != "transformers.modeling_utils" or _ready(QUANTIZERS):
                importlib.import_module(AFTER[name])

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Make transformers load lowq checkpoints and PEFT adapt them: at once where imported, otherwise when they are. Idempotent.

    Also the entry point that torch calls while it is imported (its group torch.backends), so that a process which never
    imports lowq reads checkpoints, too.
    """
    if not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())  # type: ignore[arg-type]
    for name in AFTER:
        if _ready(name):
            importlib.import_module(AFTER[name])


def leave_out() -> None:
    """Have transformers go on without UNUSED, as if they were not installed: for processes of the command line."""
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
