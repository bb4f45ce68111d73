"""A table, sorted: nearest values, and the scales that fit them best."""

import torch

from lowq_cli.quantizers._slabs import store_scales
from lowq_packers.scheme import Scheme
from lowq_packers.tables import from_bytes, to_bytes, values

# Where the search for a group's scale starts, as shares of the one that reaches its largest weight; of powers of two, all the
# neighbours. Each is followed by REFINE fits to the codes that it led to.
SHARES = {"float": (1.0, 0.85, 0.7), "e4m3": (1.0, 0.85, 0.7), "e8m0": (1.0, 2.0, 0.5)}
REFINE = 2
TINY = 1e-30  # in place of the scale 0 of an all-zero group


class Book:
    """A table, sorted, and the scales that a scheme can store."""

    def __init__(self, scheme: Scheme, companion: torch.Tensor | None, device: torch.device, dtype: torch.dtype | None) -> None:
        self.scheme, self.dtype = scheme, dtype
        self.factor = 1.0 if companion is None or scheme.table == "fitted" else companion
        table = values(scheme, companion, device)[0]
        ordered, order = table.sort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]  # of e2m1's two zeros the one without a sign
        self.values, self.codes = ordered[first], order[first]
        self.between = (self.values[1:] + self.values[:-1]) / 2
        self.most = float(table.abs().max())

    def store(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positive scales (N, G) as the scheme stores them, and what they then are in fp32."""
        kind = self.scheme.scale
        if kind == "float":
            stored = store_scales(scales, self.dtype)
            return stored, stored
        stored = to_bytes(scales / self.factor, kind)
        return stored, self.wide(stored)

    def wide(self, stored: torch.Tensor) -> torch.Tensor:
        """What stored scales are in fp32."""
        return stored if self.scheme.scale == "float" else from_bytes(stored, self.scheme.scale) * self.factor

    def start(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales (N, G) that reach the largest weight of groups (N, G, g). Of e8m0: by exponents, as the standard has it."""
        top = groups.abs().amax(-1)
        if self.scheme.scale == "e8m0":  # OCP Microscaling Formats 1.0, section 6.3
            exponents = torch.frexp(top)[1] - torch.frexp(torch.tensor(self.most))[1]
            return self.store(torch.ldexp(torch.ones_like(top), torch.where(top > 0, exponents, -127)))
        return self.store(top / self.most)

    def places(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Of each weight of groups (N, G, g) the place of its nearest value in the sorted table."""
        return torch.bucketize(groups / scales.clamp(min=TINY).unsqueeze(-1), self.between)

    def nearest(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Codes (R, G, g) for scales (R, G)."""
        return self.codes[self.places(groups, scales)]

    def nearest_of(self, scales: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of a column (R,) for scales (R,), and their values."""
        places = self.places(column.unsqueeze(-1), scales).squeeze(-1)
        return self.codes[places], self.values[places] * scales

    def search(self, groups: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and stored scales with the least squared error that are met from several starts.

        weights: (g,) or (G, g) positive importance of each place in a group; None counts all alike.
        """
        stored, first = self.start(groups)
        codes, best = self.nearest(groups, first), torch.full_like(first, torch.inf)
        weighted = groups if weights is None else groups * weights
        for share in SHARES[self.scheme.scale]:
            now, wide = self.store(first * share)
            for _ in range(REFINE + 1):
                places = self.places(groups, wide)
                q = self.values[places]
                counted = q if weights is None else q * weights
                loss = (groups - q * wide.unsqueeze(-1)).square_()
                loss = (loss if weights is None else loss * weights).sum(-1)
                better = loss < best
                best = torch.where(better, loss, best)
                stored = torch.where(better, now, stored)
                codes = torch.where(better.unsqueeze(-1), self.codes[places], codes)
                along, spread = torch.linalg.vecdot(weighted, q), torch.linalg.vecdot(counted, q)
                now, wide = self.store(torch.where((along > 0) & (spread > 0), along / spread, wide))
        return codes, stored
