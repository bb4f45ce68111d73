"""Every file is opened by one door, packers/regular.py: what goes round it is listed here with its reason."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [p for folder in ("lowq_cli", "kernels", "packers") for p in sorted((ROOT / folder).rglob("*.py"))]
READS = {  # what opens a file by its name to read it: a function, a method, or its class
    *("open", "read_text", "read_bytes", "safe_open", "load_file", "from_file", "fromfile", "memmap", "CDLL", "mmap"),
    *("load_library", "GGUFReader", "from_pretrained", "load_safetensors", "LoadLibrary", "ElementTree", "open_code"),
}
MODULES_OF_LOADS = {"json", "torch", "np", "numpy", "pickle", "tomllib", "yaml"}  # whose `load` reads a file
OURS = "lowq_packers.regular"
ROUND = {  # (file, call) -> why it need not go through the door
    ("kernels/cuda/nvrtc.py", "ctypes.CDLL"): "NVIDIA's library, found by NVIDIA's package",
    ("kernels/cuda/nvrtc.py", "p.read_text"): "the package's own sources",
    ("kernels/dispatch/policy.py", "f.read_text"): "the package's own tables",
    ("kernels/dispatch/sources.py", "path.read_text"): "the package's own sources",
    ("kernels/products/cpu/building.py", "p.read_text"): "the package's own sources",
    ("kernels/products/cpu/building.py", "log.read_text"): "what the compiler has just written",
    ("kernels/products/cpu/native.py", "ctypes.CDLL"): "what was checked in a folder of this user alone, or the wheel's",
    ("lowq_cli/calibrate/end_to_end.py", "load_file"): "the name of the open file",
    ("lowq_cli/calibrate/layer_file.py", "safe_open"): "the name of the open file",
    ("lowq_cli/serving/http/batch_file.py", "path.open"): "answers are added to it; `answered` reads it by the door",
    ("lowq_cli/run/draft_training.py", "load_file"): "the name of the open file",
    ("lowq_cli/run/draft_training.py", "safe_open"): "the name of the open file",
    ("lowq_cli/running.py", "log.read_text"): "what a process of ours has just written",
    ("lowq_cli/devices.py", "ctypes.CDLL"): "the GPU's driver, by its bare name",
    ("lowq_cli/engine/saved_cache.py", "safe_open"): "the name of the open file",
    ("lowq_cli/engine/open_model.py", "quota_file.read_text"): "a file of the kernel's",
    ("lowq_cli/engine/timeline.py", "timeline.read_text"): "what torch's profiler has just written",
    ("lowq_cli/files/picture_file.py", "Image.open"): "bytes in memory",
    ("lowq_cli/files/source.py", "mmap.mmap"): "an open file",
    ("lowq_cli/hf/chat_template.py", "open"): "a file of the kernel's",
    ("kernels/graphs.py", "ctypes.CDLL"): "the GPU's driver, by its bare name",
    ("lowq_cli/hf/structure.py", "tokenize.open"): "the source file of a class that is imported",
    ("lowq_cli/hf/pictures.py", "AutoImageProcessor.from_pretrained"): "a view of the checked files",
    ("lowq_cli/hf/tower.py", "cls.from_pretrained"): "tensors in memory, no file",
    ("lowq_cli/serving/http/pictures.py", "open"): "a file of the kernel's",
    ("lowq_cli/hf/load.py", "cls.from_pretrained"): "a view, whose files went through the door",
    ("lowq_cli/hf/tokenizer.py", "AutoTokenizer.from_pretrained"): "a view, whose files went through the door",
    ("lowq_cli/interop/foreign.py", "torch.load"): "the name of the open file",
    ("lowq_cli/interop/vllm_speed.py", "out.read_text"): "what a process of ours has just written",
    ("lowq_cli/memory.py", "read_text"): "files of the kernel's",
    ("lowq_cli/files/locks.py", "read_text"): "a file of the kernel's",
    ("lowq_cli/quantizers/__init__.py", "path.open"): "the package's own sources",
    ("lowq_cli/quantizers/__init__.py", "read_text"): "the package's own sources",
    ("lowq_cli/run/own_text_plan.py", "safe_open"): "the name of the open file",
    ("lowq_cli/serving/host_cache.py", "torch.from_file"): "memory of this process, by the name of an open file",
    ("lowq_cli/serving/http/app.py", "read_bytes"): "the package's own page",
    ("lowq_cli/files/locks.py", "os.open"): "a lock, of which nothing is read",
    ("lowq_cli/files/folder.py", "os.open"): "a mark, whose kind is asked of the open file",
    ("packers/atomic.py", "os.open"): "locks, and files that this process has just written",
    ("packers/regular.py", "open"): "the door",
    ("packers/regular.py", "os.open"): "the door",
}


def of_modules(tree: ast.AST) -> dict[str, str]:
    """Names that a file imports -> where from."""
    result = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            result |= {a.asname or a.name: f"{node.module}" for a in node.names}
        elif isinstance(node, ast.Import):
            result |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
    return result


def spelled(call: ast.Call) -> str:
    """A call's function: `open`, `os.open`, `path.read_text`; only the last name where what is before it is an expression."""
    f = call.func
    if isinstance(f, ast.Attribute):
        return f"{f.value.id}.{f.attr}" if isinstance(f.value, ast.Name) else f.attr
    return f.id if isinstance(f, ast.Name) else ""


def writes(call: ast.Call) -> bool:
    """Whether an `open` is for writing alone, of a folder, of a file that is open, or of nothing (os.devnull)."""
    text = ast.unparse(call)
    if "O_WRONLY" in text or "O_DIRECTORY" in text or "O_CREAT" in text or "devnull" in text:
        return True
    if spelled(call) == "os.open":
        return False
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and spelled(first) in ("open_regular", "open_bounded", "os.open"):
        return True
    modes = [
        a.value for a in [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")] if isinstance(a, ast.Constant)
    ]
    return any(isinstance(m, str) and set(m) & set("wxa+") for m in modes)


def round_the_door(source: str) -> list[str]:
    """The calls of a source that open a file by its name to read it, and are not the door's."""
    tree = ast.parse(source)
    names, result = of_modules(tree), []
    own = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = spelled(call)
        head, _, leaf = name.rpartition(".")
        if leaf == "load" and head in MODULES_OF_LOADS:
            result.append(name)
        if leaf not in READS or (names.get(leaf, "") == OURS and not head):
            continue
        if not head and (name in own or names.get(leaf, "").startswith("lowq_")):
            continue  # a function of ours, looked at where it is written
        if head and names.get(head, "").startswith("lowq_"):
            continue
        if leaf == "open" and writes(call):
            continue
        result.append(name)
    return result


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_opened_round_the_door(path):
    where = str(path.relative_to(ROOT))
    unlisted = [call for call in round_the_door(path.read_text()) if (where, call) not in ROUND]
    assert not unlisted, f"{where}: open it by lowq_packers.regular, or say in ROUND why not"


def test_the_list_names_present_calls():
    there = {(str(p.relative_to(ROOT)), call) for p in SOURCES for call in round_the_door(p.read_text())}
    assert set(ROUND) - there == set()


@pytest.mark.parametrize(
    "line",
    [
        "open(p)",
        "open(p, 'rb').read()",
        "p.read_text()",
        "Path(p).read_bytes()",
        "(a / b).read_text(encoding='utf-8')",
        "p.open()",
        "os.open(p, os.O_RDONLY)",
        "io.open(p)",
        "json.load(open_it)",
        "torch.load(p)",
        "np.fromfile(p)",
        "np.memmap(p)",
        "from safetensors import safe_open\nsafe_open(p, 'pt')",
        "from safetensors.torch import load_file\nload_file(p)",
        "Tokenizer.from_file(p)",
        "ctypes.CDLL(p)",
        "torch.ops.load_library(p)",
        "AutoTokenizer.from_pretrained(p)",
    ],
)
def test_each_way_round_is_seen(line):
    assert round_the_door(line)


@pytest.mark.parametrize(
    "line",
    [
        "from lowq_packers.regular import read_text\nread_text(p)",
        "open(p, 'wb')",
        "os.open(p, os.O_WRONLY)",
        "open(open_regular(p), 'rb')",
        "os.open(p, os.O_RDONLY | os.O_DIRECTORY)",
        "from lowq_cli.calibrate import texts\ntexts.read_text(p)",
    ],
)
def test_the_door_and_writing_are_not(line):
    assert not round_the_door(line)
