"""Fixtures: the tiny checkpoints of checkpoints.py, each written once, and the demo at 4 bits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import SCHEMES, Checkpoints, Family, write_byte_tokenizer, write_dense, write_dequantized, write_packed
from shallow import shallow

from lowq_packers.scheme import Scheme


@pytest.fixture
def text(tmp_path):
    """A file to calibrate on: 2,400 tokens of bytes, two batches of windows of 128."""
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 30)
    return str(path)


@pytest.fixture(scope="session")
def family_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoints]:
    """(family, dtype, schemes, positions) -> its three folders, not to be written into; a tokenizer is in the dense one."""
    made: dict[tuple[object, ...], Checkpoints] = {}

    def make(
        family: str | Family, dtype: str = "float32", schemes: dict[str, Scheme] = SCHEMES, positions: int = 128
    ) -> Checkpoints:
        key = (str(family), dtype, str(schemes), positions)
        if key not in made:
            root = tmp_path_factory.mktemp(family if isinstance(family, str) else family[0])
            made[key] = write_packed(write_dense(root / "dense", family, dtype, positions), root, schemes)
            write_byte_tokenizer(made[key].dense)
        return made[key]

    return make


@pytest.fixture(scope="session")
def pack_checkpoint() -> Callable[..., Checkpoints]:
    """`write_packed`, with SCHEMES by default: (dense folder, output folder, schemes, dtype) -> folders."""
    return lambda dense, folder, schemes=SCHEMES, dtype=None: write_packed(dense, folder, schemes, dtype)


@pytest.fixture(scope="session")
def dequantize_checkpoint() -> Callable[[Path, Path, Path], Path]:
    """`write_dequantized`: (dense folder, packed folder, output folder) -> output folder."""
    return write_dequantized


@pytest.fixture(scope="session")
def bf16_checkpoints(
    family_checkpoints: Callable[..., Checkpoints], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Checkpoints]:
    """`family_checkpoints` in bf16, with scales and zeros in bf16 too, as `lowq quantize` has them; not to be written into."""
    from safetensors.torch import load_file, save_file

    made: dict[tuple[str, str], Checkpoints] = {}

    def make(family: str, schemes: dict[str, Scheme]) -> Checkpoints:
        key = (family, str(schemes))
        if key not in made:
            result = family_checkpoints(family, "bfloat16", schemes)
            packed = tmp_path_factory.mktemp(family) / "packed"
            shutil.copytree(result.packed, packed)
            tensors = load_file(packed / "model.safetensors")
            tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
            save_file(tensors, packed / "model.safetensors")
            made[key] = replace(result, packed=packed)
        return made[key]

    return make


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which holds lowq's compiled CPU kernels alone: to compile them takes 14 s."""
    from lowq_kernels.products.cpu.native import library
    from lowq_packers.home import cache_dir

    library()
    compiled = cache_dir() / "cpu"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if compiled.is_dir():
        shutil.copytree(compiled, cache_dir() / "cpu", ignore=shutil.ignore_patterns("building*", ".*"))
    return cache_dir()


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's first two layers of six; not to be written into."""
    return shallow(tmp_path_factory.mktemp("short") / "demo", 2)


@pytest.fixture(scope="session")
def demo4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo at 4 bits without a zero (Q4_0), its down projections at 8 (Q8_0)."""
    from lowq_cli.run.pipeline import quantize

    out = tmp_path_factory.mktemp("demo") / "demo4"
    quantize("demo", out=out, bits=4, group=32, method="rtn", zero="none", overrides=["down_proj=8:32"])
    return out


@pytest.fixture(scope="session")
def demo_gguf(demo4: Path) -> Path:
    """`demo4` as a GGUF file."""
    from lowq_cli.interop.exporter import export

    out = demo4.with_name("demo.gguf")
    export(demo4, "gguf", out)
    return out
