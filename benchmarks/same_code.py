"""Whether CUDA sources compile to the machine code that they compiled to at another revision. Needs NVRTC, and no GPU.

    python benchmarks/same_code.py main                        every kernel that the compile tests name; minutes
    python benchmarks/same_code.py main tile_mma.cu attend.cu  instances of these sources
    python benchmarks/same_code.py main --every 10             each tenth instance

Each difference is a line: the instance, how many of its instructions differ, and registers and spills where they changed. An
instruction that only names another register counts as different. Exit code 1 where anything differs.
"""

import argparse
import contextlib
import io
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowq_kernels.cuda import nvrtc
from lowq_kernels.cuda.wgmma_headers import wgmma_headers

ROOT = Path(__file__).parents[1]
TESTS = [f"tests/kernels/test_{t}.py" for t in ("cuda_compile", "tile8", "tile_int8x2", "int8_planes", "decode_cuda", "fp8")]
Instance = tuple[str, str, str]  # source, expression, architecture


def instances() -> list[Instance]:
    """What the compile tests ask for; nothing is compiled, so that this takes half a minute."""
    asked: dict[Instance, None] = {}

    class Nothing(nvrtc.Cubin):
        resources = dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "smem"), 0)

    def compiled(*instance: str) -> nvrtc.Cubin:
        asked[instance] = None  # type: ignore[index]
        return Nothing(b" ", " ", "")

    sys.path.append(str(ROOT / "tests" / "emulator"))
    from machine_code import RECORD

    RECORD.clear()  # every test asks the compiler
    real = nvrtc.compiled
    compiled.cache_clear = real.cache_clear  # type: ignore[attr-defined]
    nvrtc.compiled = compiled  # type: ignore[assignment]
    names = "compile or registers or spill or tile or attend or prompt or experts or others or planes or wgmma"
    with contextlib.redirect_stdout(io.StringIO()):  # tests of the cache fail on what is not compiled
        pytest.main(["-q", "--tb=no", "-k", names, *TESTS])
    nvrtc.compiled = real
    return [i for i in asked if i[0] in nvrtc.sources()]


def sources(revision: str) -> dict[str, str]:
    """The CUDA sources of a revision by name, as `nvrtc.sources()` has them."""
    packed = subprocess.run(["git", "archive", revision, "kernels", "benchmarks"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        files = {m.name: archive.extractfile(m) for m in archive if m.name.endswith((".cu", ".cuh"))}
        return {Path(name).name: f.read().decode() for name, f in files.items() if f} | wgmma_headers()


def compile_with(text: dict[str, str], instance: Instance) -> nvrtc.Cubin:
    """An instance compiled from other sources, past the cache."""
    nvrtc.sources().update(text)
    nvrtc.included.cache_clear()
    return nvrtc._compile(*instance)


def sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of an ELF file."""
    start = struct.unpack_from("<Q", image, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + i * size) for i in range(count)]
    for name, kind, _, _, offset, length, *_ in headers:
        begin = headers[names][4] + name
        yield image[begin : image.index(b"\0", begin)].decode(), b"" if kind == 8 else image[offset : offset + length]


def code(cubin: nvrtc.Cubin) -> list[bytes]:
    """The instructions of a kernel, 16 bytes each."""
    text = b"".join(content for name, content in sections(cubin.image) if name.startswith(".text"))
    return [text[i : i + 16] for i in range(0, len(text), 16)]


def difference(old: nvrtc.Cubin, new: nvrtc.Cubin) -> str | None:
    """What differs, or None."""
    a, b = code(old), code(new)
    changed = [f"{k} {v} -> {new.resources[k]}" for k, v in old.resources.items() if v != new.resources[k]]
    if a == b and not changed:
        return None
    count = f"{len(a)} -> {len(b)} instructions" if len(a) != len(b) else f"{sum(map(bytes.__ne__, a, b))} of {len(a)} differ"
    return ", ".join((count, *changed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    chosen = parser.parse_args()
    new, old = dict(nvrtc.sources()), sources(chosen.revision)
    taken = [i for i in instances() if not chosen.files or i[0] in chosen.files][:: chosen.every]
    different = more = 0
    for instance in taken:
        try:
            before = compile_with(old, instance)
        except nvrtc.CompileError:
            more += 1
            continue
        if changed := difference(before, compile_with(new, instance)):
            different += 1
            print(*instance, changed, sep="  ", flush=True)
    print(f"{len(taken)} instances, {different} differ, {more} do not compile at {chosen.revision}")
    return bool(different)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
    sys.exit(main())
