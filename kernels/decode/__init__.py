"""The operations of a transformer layer between its matrix products; `ops(device)` returns the kernels for a device.

    add_norm   residual add + RMSNorm (and, in Gemma's sandwich, a norm of the added tensor first)
    attend     q/k norm + RoPE + cache write + attention over the cache, one token per sequence
    attend_rows   the same where several rows may belong to one sequence: its newest token and drafts of the next ones
    attend_prompt   the same for many tokens of each sequence
    attend_packed   the same for tokens of sequences of any lengths, one after another, over a paged cache
    gated      act(gate) * up; activated: act(x) of an MLP without a gate; opened: y * sigmoid(gate); softcapped: logits
    normed     any family's norm; beside: two rows, each normed and then concatenated, for draft heads
    add        the update of the residual stream; update_norm: both in one; update_norms: with two norms
    prepare    changes of q, k, v before attention that `attend` does not fuse: gates, other norms and rotations
    latent     attention over latents of keys and values: a step, a prompt, packed prompts
    route_by   the experts of a token in a mixture, and their weights, by any family's router
    choose     sample the next token from logits and advance the position
    choose_rows   the same for some of many sequences, each with its own seed and temperature
    accept     count the accepted draft tokens

    attend_prepared   prepare, attend and opened in one kernel, or None where none takes them; None where the device cannot
    fold       the module that fuses add_norm and gated into the products of cuda/tile_mma; None where the device cannot

On CUDA they are the kernels of this package (dispatch chooses those of `attend`, prompts and routers; the rest are Triton).
On a CPU, C++ runs what a step needs (`cpu`, `rows_cpu`, `mixture_cpu`, `latent_cpu`, `recurrent/steps_cpu`). Everything else
runs the torch functions that define each operation (`reference`). `experts` computes a mixture's layer from packed experts.
`recurrent.dispatched` runs mixers with a state of fixed size.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowq_kernels.decode import reference
from lowq_kernels.decode.activation import activated, opened, opened_by, softcapped
from lowq_kernels.decode.latent import DEFINITION as LATENT
from lowq_kernels.decode.latent import Forms
from lowq_kernels.decode.norms import add, beside, normed, update_norm, update_norms
from lowq_kernels.decode.prepare import prepare as prepared
from lowq_kernels.decode.router import route_by as any_router
from lowq_kernels.dispatch.registry import Config
from lowq_kernels.optional import optional

if TYPE_CHECKING:
    from lowq_kernels.decode import fold


class FoldedProducts(Protocol):
    """The functions of decode/fold.py: products of one layer with the row-wise work of a step fused in."""

    NORMED: int
    ADDED: int
    SQUARES: int
    ACTS: dict[str, int]
    Residual: "type[fold.Residual]"

    def why_not(self, layer: Any, M: int, dtype: torch.dtype, fold: int) -> str | None: ...
    def config_of(self, layer: Any, M: int, dtype: torch.dtype, fold: int) -> Config: ...
    def norm_product(self, layer: Any, s: "fold.Residual") -> tuple[torch.Tensor, torch.Tensor]: ...
    def norm_product_gate(self, layer: Any, s: "fold.Residual", act: str) -> tuple[torch.Tensor, torch.Tensor]: ...
    def product_gate(self, layer: Any, x: torch.Tensor, act: str) -> torch.Tensor: ...
    def product_add(
        self, layer: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor
    ) -> "fold.Residual": ...


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation. Signatures are those of the definitions (`reference` and others), which are also
    the defaults."""

    name: str
    add_norm: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]
    attend_prompt: Callable[..., torch.Tensor]
    attend_packed: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    choose: Callable[..., None]
    choose_rows: Callable[..., None]
    route_by: Callable[..., tuple[torch.Tensor, torch.Tensor]] = any_router
    attend_rows: Callable[..., torch.Tensor] = reference.attend_rows
    accept: Callable[..., None] = reference.accept
    activated: Callable[..., torch.Tensor] = activated
    opened: Callable[..., torch.Tensor] = opened
    opened_by: Callable[..., torch.Tensor] = opened_by
    softcapped: Callable[..., torch.Tensor] = softcapped
    normed: Callable[..., torch.Tensor] = normed
    beside: Callable[..., torch.Tensor] = beside
    add: Callable[..., None] = add
    update_norm: Callable[..., torch.Tensor] = update_norm
    update_norms: Callable[..., tuple[torch.Tensor, torch.Tensor]] = update_norms
    prepare: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = prepared
    latent: Forms = LATENT
    packed_waits: Callable[[torch.dtype, Any, reference.Heads], bool] = lambda *call: False  # as `prompt.waits`
    fold: FoldedProducts | None = None
    attend_prepared: Callable[..., torch.Tensor | None] | None = None
    gate_product: Callable[[Any, torch.Tensor, str], torch.Tensor | None] | None = None
    norm_product: Callable[..., torch.Tensor | None] | None = None


TORCH = Ops("torch", **{f.name: getattr(reference, f.name) for f in fields(Ops)[1:] if f.default is MISSING})


@cache
def ops(device_type: str) -> Ops:
    """The set for a kind of device; torch's where Triton is not installed."""
    if device_type == "cpu":
        from lowq_kernels.decode import cpu, latent_cpu, mixture_cpu, rows_cpu

        of_rows = ("normed", "add", "update_norm", "update_norms", "prepare", "opened", "opened_by")
        attends = ("attend", "attend_rows", "attend_prompt", "attend_packed")
        parts = {cpu: ("add_norm", "gated", "activated", *attends), rows_cpu: of_rows}
        named: dict[str, Any] = {name: getattr(module, name) for module, names in parts.items() for name in names}
        latents = replace(LATENT, step=latent_cpu.step, prompt=latent_cpu.prompt, packed=latent_cpu.packed)
        return replace(TORCH, name="cpu", route_by=mixture_cpu.route_by, latent=latents, **named)
    if device_type != "cuda":
        return TORCH
    if optional("lowq_kernels.decode.elementwise", "triton") is None:
        return TORCH
    from lowq_kernels.decode import elementwise, latent, latent_prompt, norms_triton, prepare_triton, prompt, sample
    from lowq_kernels.decode.attend import attend
    from lowq_kernels.decode.attend_rows import attend_rows
    from lowq_kernels.decode.route import route_by

    folding, rounding = (optional(f"lowq_kernels.decode.{name}", "cuda") for name in ("fold", "gate_product"))
    attending = (attend, prompt.attend_prompt, prompt.attend_packed)
    choosing = (sample.choose, sample.choose_rows)
    operations = Ops(
        "triton", elementwise.add_norm, *attending, elementwise.gated, *choosing, route_by, fold=folding,
        latent=Forms(latent.dispatched, latent_prompt.prompt, latent_prompt.packed, latent_prompt.refuse),
    )  # type: ignore[arg-type]  # fmt: skip
    rows = {name: getattr(elementwise, name) for name in ("activated", "opened", "opened_by", "softcapped")}
    rows |= {name: getattr(norms_triton, name) for name in ("normed", "add", "update_norm", "update_norms", "beside")}
    together = optional("lowq_kernels.decode.attend_prepared", "cuda")
    more: dict[str, Any] = {"attend_rows": attend_rows, "accept": sample.accept, "prepare": prepare_triton.prepare}
    more |= {"attend_prepared": together and together.attend, "gate_product": rounding and rounding.gate_product}
    more["packed_waits"] = prompt.waits
    more["norm_product"] = rounding and rounding.norm_product
    return replace(operations, **more, **rows)
