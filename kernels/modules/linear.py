"""QuantLinear: the packed replacement of nn.Linear.

Its tensors are `weight`, `weight_scale`, `weight_zero` or `weight_table`, `bias`. Files hold them in the layout `stored_in`
(rowstream by default). Before the first product `prepare` converts them to the layout that the device's kernels read;
`state_dict` converts them back to rowstream, bit for bit. Weights of blocks in fp8 stay as files hold them. On a device without
FP8 hardware they are widened once; activations are then rounded to fp8 and back, so the numbers are those of the hardware up to
the order of sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lowq_kernels.activations import Act, check_act
from lowq_kernels.dispatch.layouts import best_layout
from lowq_kernels.fp8.matmul import WIDENED, has_fp8, widened, widened_linear
from lowq_kernels.modules import ops
from lowq_packers.errors import SchemeError, UnsupportedError
from lowq_packers.layouts import DISK, LAYOUTS, PackedWeight, get, pack, pack_facts, repack
from lowq_packers.qtensor import QuantizedTensor, check_fits, float_dtype
from lowq_packers.scheme import E4M3, Scheme


def blank_table(scheme: Scheme, device: torch.device | str | None, *lead: int) -> nn.Parameter | None:
    """A parameter (*lead, width) for the values of a table scheme; None for other schemes."""
    if not scheme.table_width:
        return None
    return nn.Parameter(torch.ones((*lead, scheme.table_width), dtype=torch.float32, device=device), requires_grad=False)


@contextmanager
def only_moved(module: nn.Module, *leaves: str) -> Iterator[None]:
    """Move these tensors to the module's device, but keep their dtype: a kernel's, or fp32."""
    before = {leaf: t.data for leaf in leaves if (t := getattr(module, leaf)) is not None}  # `_apply` would cast them in place
    yield
    device = next(t.device for name, t in module.named_parameters(recurse=False) if name not in before)
    for leaf, t in before.items():
        moved, is_parameter = t.to(device), leaf in module._parameters
        setattr(module, leaf, nn.Parameter(moved, requires_grad=False) if is_parameter else moved)


class QuantLinear(nn.Module):
    """y = x @ dequantize(weight)^T + bias, x (..., K) -> (..., N).

    Args:
        N, K: out_features, in_features.
        scheme: bits, group size, kind of zero.
        bias: whether there is one.
        dtype: of scales (unless the scheme says it), zeros, bias (fp16, bf16 or fp32).
        layout: the layout to compute in; "auto" chooses by `best_layout` once the device is known.
        kernel: force one kernel by name; None lets dispatch choose.
        stored_in: the layout of the tensors that will be assigned to it.
    Raises:
        SchemeError: a K that the scheme cannot group.
    """

    def __init__(
        self,
        N: int,
        K: int,
        scheme: Scheme,
        bias: bool = False,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
        layout: str = "auto",
        kernel: str | None = None,
        stored_in: str = DISK,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features, self.scheme = N, K, scheme
        self.in_blocks = scheme.block_rows > 1
        self.layout_wanted, self.kernel, self.layout = layout, kernel, E4M3 if self.in_blocks else stored_in
        form = get(self.layout)
        assert form.shapes
        of_words, of_scales = form.shapes(scheme, N, K)
        words = torch.zeros(of_words, dtype=getattr(torch, form.words), device=device)
        self.weight = nn.Parameter(words, requires_grad=False)
        of_scale = {"float": dtype, "f32": torch.float32}.get(scheme.scale, torch.uint8)
        self.weight_scale = nn.Parameter(torch.zeros(of_scales, dtype=of_scale, device=device), requires_grad=False)
        zeros = None if scheme.zero == "none" else torch.zeros(of_scales, dtype=dtype, device=device)
        self.weight_zero = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.weight_table = blank_table(scheme, device, 1)
        self.computed_in = dtype
        self.bias = nn.Parameter(torch.zeros(N, dtype=dtype, device=device), requires_grad=False) if bias else None
        self.register_buffer("aux", None, persistent=False)
        self._packed: PackedWeight | None = None

    @classmethod
    def from_quantized(
        cls,
        q: QuantizedTensor,
        bias: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str = torch.float16,
        layout: str = "auto",
        kernel: str | None = None,
    ) -> "QuantLinear":
        """A ready layer from codes, scales and zeros; scales, zeros and bias are cast to `dtype`, which x should have.

        Raises SchemeError where that cannot hold them, naming one that can. An x in fp32 is computed, too, but without a fused
        kernel: each product dequantizes the weight.
        """
        dtype = float_dtype(dtype)
        if bias is not None and bias.shape != (q.shape[0],):
            raise SchemeError(
                f"the bias must be ({q.shape[0]},), one number for each row of the weight, got {tuple(bias.shape)}"
            )
        if q.scale == "float":
            check_fits("the weight", dtype, q.scales, q.zeros)
        if layout != "auto":
            get(layout)
        target = q.W_q.device if device is None else torch.device(device)
        return cls.from_packed(pack(q.held(dtype).to(target), DISK), bias, layout, kernel, dtype)

    @classmethod
    def from_packed(
        cls,
        p: PackedWeight,
        bias: torch.Tensor | None = None,
        layout: str = "auto",
        kernel: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "QuantLinear":
        """A ready layer that takes over a packed weight, on its device; a bias (N,) is cast to the dtype of the scales.

        dtype: that the layer computes in where its scales, whose dtype the scheme says, do not say so.
        """
        dtype = p.scales.dtype if p.scheme.scale == "float" else dtype
        lin = cls(p.N, p.K, p.scheme, bias is not None, dtype, "meta", layout, kernel)
        lin._hold(p)
        if bias is not None:
            lin.bias = nn.Parameter(bias.detach().to(p.words.device, dtype).contiguous(), requires_grad=False)
        return lin.prepare()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in: that of its scales, unless the scheme fixes theirs."""
        return self.weight_scale.dtype if self.scheme.scale == "float" else self.computed_in

    @property
    def packed(self) -> PackedWeight:
        """The weight in its current layout."""
        if self._packed is not None:
            return self._packed
        zeros, table = (None if t is None else t.data for t in (self.weight_zero, self.weight_table))
        shape = (self.out_features, self.in_features)
        tensors = (self.weight.data, self.weight_scale.data, zeros)
        packed = PackedWeight(*tensors, self.scheme, *shape, self.layout, self.aux, table)
        if not self.weight.is_meta:  # on meta the real tensors are still to come, by assignment
            self._packed = packed
        return packed

    def _hold(self, p: PackedWeight) -> None:
        """Set `p` as this layer's tensors."""
        self.weight = nn.Parameter(p.words, requires_grad=False)
        self.weight_scale = nn.Parameter(p.scales, requires_grad=False)
        self.weight_zero = None if p.zeros is None else nn.Parameter(p.zeros, requires_grad=False)
        self.weight_table = None if p.table is None else nn.Parameter(p.table, requires_grad=False)
        self.aux, self.layout, self._packed = p.aux, p.layout, None

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantLinear":
        """Move the weight into the layout this device computes in. Called after loading; idempotent."""
        if self.weight.is_meta:
            raise SchemeError("QuantLinear holds no weight yet (meta device); load a state dict first")
        if self.in_blocks:
            self.computed_in = dtype or self.computed_in
            if self.layout != WIDENED and not has_fp8(self.weight.device):
                self._hold(widened(self.packed, self.computed_in))
            return self
        layout = self.layout_wanted
        if layout == "auto":
            device = self.weight.device
            shape = (self.scheme, self.out_features, self.in_features, dtype or self.dtype)
            layout = best_layout(*shape, device, kernel=self.kernel)
        if layout != self.layout:
            self._hold(repack(self.packed, layout))
        return self

    act: Act = "none"

    def set_act(self, act: Act) -> None:
        """Round the rows of x to 8 bits from now on ("int8", "fp8"), or leave them ("none").

        Raises UnsupportedError for int8 against weights in fp8: no hardware multiplies those.
        """
        if check_act(act) == "int8" and self.in_blocks:
            raise UnsupportedError("fp8 weights take activations in fp8 or as they are, not in int8; use --act fp8 or none")
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N), in x's dtype."""
        if x.shape[-1] != self.in_features:
            raise SchemeError(f"x has {x.shape[-1]} features, the layer takes K={self.in_features}")
        if not x.numel():  # like nn.Linear: no rows in, no rows out
            return x.new_empty(*x.shape[:-1], self.out_features)
        flat = x.reshape(-1, self.in_features)
        if self.layout == WIDENED:
            y = widened_linear(flat, self.weight, self.bias, self.act)
        elif ops.through_autograd(flat):
            tensors = (self.weight, self.weight_scale, self.weight_zero, self.aux, self.bias)
            facts = pack_facts(self.scheme, self.out_features, self.in_features, self.layout)
            y = ops.linear(flat, *tensors, facts, self.kernel, self.act, self.weight_table)
        else:
            y = ops.product(flat, self.packed, self.bias, self.kernel, self.act)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Moving to another kind of device may change the layout; a layout that does not exist there is converted to `DISK`."""
        before, scales = self.weight.device.type, self.weight_scale
        self.computed_in = kind = fn(torch.empty(0, dtype=self.dtype, device=scales.device)).dtype
        if not scales.is_meta and self.scheme.scale == "float" and kind != scales.dtype:
            check_fits(f"a layer {self.out_features} x {self.in_features}", kind, scales.data, self.packed.zeros)
        if self.in_blocks:  # which move, and keep their dtype
            exempt = [scales] if self.layout == WIDENED else [scales, self.weight]
            super()._apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype) if any(t is k for k in exempt) else fn(t), recurse)
            self._packed = None
            return self
        if self.layout != DISK and before != "meta":
            probe = fn(torch.empty(0, device=self.weight.device))
            if probe.device.type != before:
                if LAYOUTS[self.layout].shapes is None:
                    self._hold(repack(self.packed, DISK))
                with only_moved(self, "weight_table"):
                    super()._apply(fn, recurse)
                self._packed = None
                return self if self.weight.is_meta else self.prepare()
        with only_moved(self, "aux", "weight_table"):
            super()._apply(fn, recurse)
        self._packed = None
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        p = self.packed if self.weight.is_meta or self.in_blocks else repack(self.packed, DISK)
        tensors = {
            "weight": p.words,
            "weight_scale": p.scales,
            "weight_zero": p.zeros,
            "weight_table": p.table,
            "bias": self.bias,
        }
        for name, t in tensors.items():
            if t is not None:
                destination[prefix + name] = t if keep_vars else t.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        ready = self.layout != DISK and not self.in_blocks
        if ready:
            self._hold(repack(self.packed, DISK))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._packed = None
        if ready:
            self.prepare()

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features}, {self.out_features}, {self.scheme}, layout={self.layout}, bias={self.bias is not None}"
