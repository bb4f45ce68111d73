"""Take lowq's packages from the checkout that holds this file: in a git worktree the installed ones are another checkout's."""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"lowq_cli": "lowq_cli", "lowq_kernels": "kernels", "lowq_packers": "packers", "lowq.py": "lowq.py"}


def use() -> None:
    """Let this process and those that it starts import lowq from here. Nothing changes where that is so already."""
    specs = [importlib.util.find_spec(name.removesuffix(".py")) for name in PACKAGES]
    if all(s is not None and s.origin and Path(s.origin).resolve().is_relative_to(ROOT) for s in specs):
        return
    links = tempfile.mkdtemp(prefix="lowq-tree-")
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    for name, place in PACKAGES.items():
        Path(links, name).symlink_to(ROOT / place)
    sys.path.insert(0, links)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (links, os.environ.get("PYTHONPATH"))))
