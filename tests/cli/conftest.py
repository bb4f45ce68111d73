"""Fixtures: the tiny checkpoints of checkpoints.py, each written once, and the demo at 4 bits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import SCHEMES, Bytes, Checkpoints, write_dense, write_dequantized, write_packed

from lowq_packers.scheme import Scheme


@pytest.fixture
def small_calibration(monkeypatch):
    """Windows of 32 tokens, two at a time; a tokenizer whose tokens are the text's bytes."""
    from lowq_cli.calibrate import texts

    monkeypatch.setattr(texts, "WINDOW", 32)
    monkeypatch.setattr(texts, "BATCH", 2)
    monkeypatch.setattr("lowq_cli.hf.tokenizer.load_tokenizer", lambda source: Bytes())
    monkeypatch.setattr("lowq_cli.engine.open_model.tokenizer", lambda source: Bytes())


@pytest.fixture
def text(tmp_path):
    """A file of about 950 bytes to calibrate on."""
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 12)
    return str(path)


@pytest.fixture(scope="session")
def family_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoints]:
    """(family, dtype, schemes) -> its three folders, made once. Tests must not write into them."""
    made: dict[tuple[str, ...], Checkpoints] = {}

    def make(family: str, dtype: str = "float32", schemes: dict[str, Scheme] = SCHEMES) -> Checkpoints:
        key = (family, dtype, str(schemes))
        if key not in made:
            root = tmp_path_factory.mktemp(family)
            made[key] = write_packed(write_dense(root / "dense", family, dtype), root, schemes)
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
            found = family_checkpoints(family, "bfloat16", schemes)
            packed = tmp_path_factory.mktemp(family) / "packed"
            shutil.copytree(found.packed, packed)
            tensors = load_file(packed / "model.safetensors")
            tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
            save_file(tensors, packed / "model.safetensors")
            made[key] = replace(found, packed=packed)
        return made[key]

    return make


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
