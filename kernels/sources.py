"""What a kernel is made of, as a hash: a time or a config measured with other code says nothing of today's.

Counted are the module of the launcher, the modules of the same folder that it imports, the CUDA sources that any of them
names and what those include; not comments, docstrings or blank lines, which change no binary.
"""

import hashlib
import re
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from lowq_kernels.registry import kernels

SINGLE = "lowq_kernels"  # its own modules (cpu.py, dequant.py) stand for themselves: the rest there is shared by all


@cache
def source_hash(kernel: str) -> str:
    """Twelve hex digits of the code that a registered kernel consists of."""
    module = kernels()[kernel].launch.__module__
    package, _, name = module.rpartition(".")
    folder, found = resources.files(package), dict[str, str]()
    _collect(folder, package, f"{name}.py", found)
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(f"{file}\n{found[file]}\n".encode())
    return digest.hexdigest()[:12]


def _collect(folder: Traversable, package: str, file: str, found: dict[str, str]) -> None:
    """Add a file of the folder and everything in the folder that it needs."""
    path = folder / file
    if file in found or not path.is_file():
        return
    text = found[file] = code_of(path.read_text(encoding="utf-8"), file)
    if package == SINGLE:
        return
    for name in re.findall(rf"from {re.escape(package)}\.(\w+) import", text):
        _collect(folder, package, f"{name}.py", found)
    for siblings in re.findall(rf"from {re.escape(package)} import ([\w, ]+)", text):
        for name in re.split(r"\W+", siblings):
            _collect(folder, package, f"{name}.py", found)
    for name in re.findall(r"""["'](\w+\.cuh?)["']""", text):
        _collect(folder, package, name, found)


def code_of(text: str, file: str) -> str:
    """A source without what the compiler does not read. Plain text operations: every version of Python finds the same."""
    if file.endswith(".py"):
        text = re.sub(r'^\s*"{3}.*?"{3}\s*$', "", text, flags=re.S | re.M)
        text = re.sub(r"""(^|\s)# [^"'\n]*$""", "", text, flags=re.M)
    else:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
