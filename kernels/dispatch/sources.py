"""What a kernel is made of, as a hash: a time or a config measured with other code says nothing of today's.

Counted are the module of the launcher, the modules of this package that it imports (but for dispatch and the root's, which
all kernels share), the CUDA and C++ sources that any of them names and what those include; not comments, docstrings or
blank lines, which change no binary.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from lowq_kernels.dispatch.registry import kernels

ROOT = Path(__file__).parents[1]
COMPILED = {p.name: p for p in sorted(ROOT.rglob("*.*")) if p.suffix in (".cu", ".cuh", ".cpp", ".h")}  # flat, as NVRTC has it


@cache
def source_hash(kernel: str) -> str:
    """Twelve hex digits of the code that a registered kernel consists of."""
    files = closure(kernels()[kernel].launch.__module__)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\n{files[file]}\n".encode())
    return digest.hexdigest()[:12]


def closure(module: str) -> dict[str, str]:
    """File name -> code of a module and everything that it needs."""
    files: dict[str, str] = {}
    _collect(_path_of(module), files)
    return files


def _path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _collect(path: Path, sources: dict[str, str]) -> None:
    if not path.is_file() or str(path.relative_to(ROOT)) in sources:
        return
    text = sources[str(path.relative_to(ROOT))] = code_of(path.read_text(encoding="utf-8"), path.name)
    for package, names in re.findall(r"from (lowq_kernels\.\w[\w.]*) import ([\w, ]+|\()", text):
        if not package.startswith("lowq_kernels.dispatch"):
            for module in (package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))):
                _collect(_path_of(module), sources)
    for name in re.findall(r"""["'](\w+\.(?:cuh?|cpp|h))["']""", text):
        if name in COMPILED:
            _collect(COMPILED[name], sources)


def code_of(text: str, file: str) -> str:
    """A source without what the compiler does not read. Plain text operations: every version of Python finds the same."""
    if file.endswith(".py"):
        text = re.sub(r'^\s*"{3}.*?"{3}\s*$', "", text, flags=re.S | re.M)
        text = re.sub(r"""(^|\s)# [^"'\n]*$""", "", text, flags=re.M)
    else:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
