"""The only package that imports transformers: it reads model structure and loads lowq checkpoints.

`register` adds the quant_method "lowq" to transformers without importing it: `import lowq` imports neither torch nor
transformers (1 ms instead of several seconds), and the quantizer is registered once something imports transformers.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

UNUSED = ("hqq", "sklearn")  # transformers imports these where they are installed: 2.7 s with inductor, 0.7 s with scipy
QUANTIZERS = "transformers.quantizers.auto"  # the module that holds transformers' table of quantizers
AFTER = {  # module of transformers or PEFT -> lowq's module that registers there
    QUANTIZERS: "lowq_cli.hf.quantizer",
    "transformers.modeling_utils": "lowq_cli.hf.quantizer",  # imported later; for a `register` called while QUANTIZERS runs
    "peft.tuners.lora.model": "lowq_cli.hf.lora",
}


def _ready(name: str) -> bool:
    """Whether a module is imported completely."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _AfterImport:  # not a MetaPathFinder: importlib.abc would double the time of `import lowq`
    """Leaves finding the modules of AFTER to the other finders, and imports lowq's module after each has run."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in AFTER:
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for s in specs if s is not None), None)
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
    """Make transformers load lowq checkpoints and PEFT adapt them: now if imported, otherwise on import. Idempotent.

    It is also an entry point of the group torch.backends, which torch calls while it is imported, so that processes that do not
    import lowq can load its checkpoints, too.
    """
    if not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())  # type: ignore[arg-type]
    for name in AFTER:
        if _ready(name):
            importlib.import_module(AFTER[name])


def leave_out() -> None:
    """Hide UNUSED from transformers, as if they were not installed: for processes of the command line."""
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
