"""The original of a file whose weights were scaled before they were quantized, as AWQ's tools do: scaled in the same way.

Columns of a matrix are multiplied by s, and what makes its inputs is divided by s: the weight of a norm, the rows of v before
o, or the rows of up before down. This leaves the model's function as it is for every s. So the original with the file's own
norms is an exact target for the file's codes: a norm gives its s, and s between two matrices is estimated from the file.
"""

from dataclasses import dataclass, field

import torch

from lowq_cli.files.safetensors_io import TORCH_NAMES
from lowq_cli.files.source import Source
from lowq_cli.run.refined_file import RefinedFile

AFTER = {  # norm -> the linears that read it, in the families whose files AWQ's tools write
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
PAIRS = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}  # divided rows -> multiplied columns
FAR = 0.7  # max. relative error between a file's matrix and the scaled original's; 2-bit grids without zeros reach about 0.6


@dataclass
class ScaledSource(Source):
    """`raw` with some matrices' rows and columns multiplied, in fp32, and other values for its norms."""

    raw: Source = field(kw_only=True)
    columns: dict[str, torch.Tensor] = field(kw_only=True)
    rows: dict[str, torch.Tensor] = field(kw_only=True)
    norms: dict[str, torch.Tensor] = field(kw_only=True)

    @property
    def identity(self) -> str:  # type: ignore[override]
        """The identity of `raw`; the scales follow from the file that is refined."""
        return f"{self.raw.identity} scaled"

    @property
    def held_bytes(self) -> int:
        """The bytes that `raw` holds."""
        return self.raw.held_bytes

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """The values as `Source.read` gives them, in fp32 where the tensor is changed."""
        header = self.headers[name]
        count = header.numel - first if count is None else count
        if name in self.norms:
            return self.norms[name].flatten()[first : first + count].clone()
        columns, rows = self.columns.get(name), self.rows.get(name)
        if columns is None and rows is None:
            return self.raw.read(name, first, count)
        K = header.shape[-1]
        top, end = first // K, -(-(first + count) // K)
        W = self.raw.read(name, top * K, (end - top) * K).float().reshape(-1, K)
        W = W if columns is None else W * columns
        W = W if rows is None else W * rows[top:end].unsqueeze(-1)
        return W.flatten()[first - top * K :][:count]

    def read_raw(self, name: str, first: int, nbytes: int) -> bytearray:
        """The bytes of the scaled values, rounded to the tensor's dtype."""
        if name not in self.norms and name not in self.columns and name not in self.rows:
            return self.raw.read_raw(name, first, nbytes)
        dtype = getattr(torch, TORCH_NAMES[self.headers[name].dtype])
        values = self.read(name, first // dtype.itemsize, nbytes // dtype.itemsize).to(dtype)
        return bytearray(values.view(torch.uint8).numpy().tobytes())

    def close(self) -> None:
        """Close the files."""
        self.raw.close()


def scaled_original(source: Source, file: RefinedFile, norms: dict[str, torch.Tensor]) -> Source | None:
    """The original, scaled as the weights of `file` were; None if scales do not explain them.

    norms: the norms of the file (checkpoint name -> values) that differ from the original's.
    """
    scaled = ScaledSource(
        source.name, source.folder, source.config, source.headers, source.files, source.where,
        raw=source, columns={}, rows={}, norms={},
    )  # fmt: skip
    for name, values in norms.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        original = source.read(name).float()
        s = torch.where(values == original, 1.0, original / values.float())
        if norm not in AFTER or not bool((s.isfinite() & (s > 0)).all()):
            return None
        scaled.norms[name] = values.float()
        scaled.columns |= {f"{layer}.{n}.weight": s for n in AFTER[norm]}
    for layer in {n.removesuffix(".weight").rpartition(".")[0] for n in norms}:
        for before, after in PAIRS.items():
            _add_pair(scaled, file, f"{layer}.{before}", f"{layer}.{after}")
    changed = {n.removesuffix(".weight") for n in (*scaled.columns, *scaled.rows)}
    if not changed <= file.matrices.keys() or not all(_explained(scaled, file, n) for n in changed):
        return None
    return scaled


def _add_pair(scaled: ScaledSource, file: RefinedFile, before: str, after: str) -> None:
    """Estimate the scales between two matrices by least squares, from the rows of the one and the columns of the other."""
    if not {before, after} <= file.matrices.keys() or f"{before}.bias" in scaled.headers:
        return
    N, K = file.matrices[before][0][0], file.matrices[after][0][1]
    if N != K:  # v before o with fewer key heads, which the tools leave as it is
        return
    first, second = (scaled.read(f"{n}.weight").reshape(file.matrices[n][0]).float() for n in (before, after))
    divided = (file.given(before).dequantize() * first).sum(1) / first.square().sum(1)
    multiplied = (file.given(after).dequantize() * second).sum(0) / second.square().sum(0)
    s = (multiplied / divided).sqrt()
    s = torch.where(s.isfinite() & (s > 0), s, 1.0)
    scaled.rows[f"{before}.weight"], scaled.columns[f"{after}.weight"] = 1 / s, s


def _explained(scaled: ScaledSource, file: RefinedFile, name: str) -> bool:
    """Whether a matrix of the file is near the scaled original's and, after a norm, nearer than to the original's as it is."""
    W = file.given(name).dequantize()
    ours, original = (s.read(f"{name}.weight").float().reshape(W.shape) for s in (scaled, scaled.raw))
    error, after_norm = (W - ours).norm(), any(name.endswith(f".{n}") for names in AFTER.values() for n in names)
    return bool(error < FAR * ours.norm() and (not after_norm or error < (W - original).norm()))
