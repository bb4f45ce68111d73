"""Orthogonal matrices that spread every coordinate over all others. Products of small blocks are fast and save memory.

All entries of a Hadamard matrix have the same magnitude, so that an outlier in one coordinate is spread evenly. One is found
for every size tried here, except for odd factors whose Paley construction needs a prime power: those get a random orthogonal
block.
"""

from math import isqrt

import torch

LARGEST = 64  # max. size of a power-of-two factor: a matmul then takes 64 multiplications per weight and factor instead of n


class Rotation:
    """R = diag(signs) (F1 x F2 x ...), (n, n) with R R^T = 1: random signs times a Kronecker product of small factors.

    Deterministic for n and seed. Every entry is +-n**-0.5 where `_odd_factor` has such a matrix.
    """

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.n = n
        self.signs = torch.randint(0, 2, (n,), generator=g).float() * 2 - 1
        odd = n & -n  # the largest power of two that divides n
        self.factors, power = _odd_factor(n // odd, odd, g)
        while power > 1:
            step = min(power, LARGEST)
            self.factors.append(_sylvester(step))
            power //= step

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., n) times R, in fp32."""
        shape = x.shape
        y = x.float() * self.signs.to(x.device)
        after = self.n
        for factor in self.factors:
            size = factor.shape[0]
            after //= size
            y = torch.einsum("abc,bd->adc", y.reshape(-1, size, after), factor.to(x.device))
        return y.reshape(shape)


def _odd_factor(m: int, power: int, g: torch.Generator) -> tuple[list[torch.Tensor], int]:
    """The factors for the odd part m of a size m * power, and the power of two that remains."""
    if m == 1:
        return [], power
    for size in (4 * m, 8 * m, 16 * m):
        if power % (size // m) == 0 and (H := _paley(size)) is not None:
            return [H], power // (size // m)
    Q, R = torch.linalg.qr(torch.randn(m, m, generator=g, dtype=torch.float64))
    return [(Q * R.diagonal().sign()).float()], power


def _sylvester(n: int) -> torch.Tensor:
    H = torch.ones(1, 1)
    while H.shape[0] < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / n**0.5


def _paley(n: int) -> torch.Tensor | None:
    """A Hadamard matrix of size n over n**0.5 by either of Paley's constructions (1933) from a prime; None if neither fits."""
    q, half = n - 1, n // 2 - 1
    if _is_prime(q) and q % 4 == 3:
        S = torch.zeros(n, n)
        S[0, 1:], S[1:, 0], S[1:, 1:] = 1, -1, _residues(q)
        H = S + torch.eye(n)
    elif _is_prime(half) and half % 4 == 1:
        S = torch.zeros(half + 1, half + 1)
        S[0, 1:], S[1:, 0], S[1:, 1:] = 1, 1, _residues(half)
        H = torch.kron(S, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) + torch.kron(
            torch.eye(half + 1), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        )
    else:
        return None
    return H / n**0.5


def _residues(q: int) -> torch.Tensor:
    """(q, q): 1 where row - column is a square modulo q, -1 where not, 0 on the diagonal."""
    chi = torch.full((q,), -1.0)
    chi[torch.arange(1, q).square() % q] = 1
    chi[0] = 0
    return chi[(torch.arange(q).unsqueeze(1) - torch.arange(q)) % q]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))
