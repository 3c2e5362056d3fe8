"""Disentangled attention (DeBERTa, He et al. 2020, arXiv:2006.03654): logits with learned vectors for each distance.

    l_ij = τ q_i·k_j + (τ q_i + c)·A[t(i - j)] + k_j·B[t(i - j)]

Transformer-XL (Dai et al. 2019, arXiv:1901.02860) is the case of A alone, a row for each distance, and c = τ (v - u),
where q holds u already. (DeBERTa has no c.)

In a window only the `2 w - 1` rows of A and B for its distances take part. Keys outside of it count, on either side, as
if they stood at one distance f, the geometric mean of w and the last distance with a row of its own: the weight is then

    φ(q_i) exp(τ q_i·A[t(±f)]) · φ(k_j) exp(k_j·B[t(±f)])

so that sums over the keys of a side suffice. Features are doubled: those of a key before its query, then those of one
behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .common import FeatureFunction, Features

#: Queries or keys that are so few that the rows of each pair are gathered, not the products with all rows.
FEW = 8

#: Bound of the exponents of factors of features.
LARGEST_EXPONENT = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Disentangled:
    """The tables of one layer; None where there is no such term.

    Attributes:
        query_table: A `[H, K, d]`.
        key_table: τ B `[H, K, d]`.
        rows: t, the row of each distance i - j from -D to D, `[2 D + 1]`; it is constant beyond.
        offset: c `[H, d]`.
    """

    query_table: Tensor | None
    key_table: Tensor | None
    rows: Tensor
    offset: Tensor | None = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> Disentangled:
        """Apply a function to the tables and c, whose first dimension is that of the heads."""
        changes = {name: function(table) for name, table in self._tables()}
        return replace(self, **changes)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tables that there are, and c."""
        return (table for _, table in self._tables())

    def _tables(self) -> Iterator[tuple[str, Tensor]]:
        tables = {"query_table": self.query_table, "key_table": self.key_table, "offset": self.offset}
        return ((name, table) for name, table in tables.items() if table is not None)

    def index(self, distance: Tensor) -> Tensor:
        """Return the rows of distances."""
        last = len(self.rows) // 2
        return self.rows[distance.clamp(-last, last) + last]

    def moved(self, query: Tensor) -> Tensor:
        """Return `τ q + c` of queries τ q `[…, H, l, d]`."""
        return query if self.offset is None else query + self.offset.unsqueeze(1).to(query.dtype)

    def pairs(self, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
        """Return what is added to the logits of queries τ q `[B, H, L, d]` and keys `[B, H, S, d]`, `[B, H, L, S]`.

        The distance is i - j, `[L, S]` or `[B, L, S]`.
        """
        index = self.index(distance).expand(len(query), -1, -1)
        parts = []
        if self.query_table is not None:
            parts.append(_products(self.moved(query), self.query_table.to(query.dtype), index))
        if self.key_table is not None:
            parts.append(_products(key, self.key_table.to(key.dtype), index.transpose(1, 2)).transpose(2, 3))
        return torch.stack(parts).sum(dim=0)

    def near(self, query: Tensor, key: Tensor, window: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the products of queries τ q `[…, H, c, d]` and of keys with a window's rows, `[…, H, c, 2 w - 1]`.

        Those of queries are in the order of falling distances, those of keys in that of rising ones.
        """
        queries, keys = self.near_tables(window)
        of_queries = None if queries is None else self.moved(query) @ queries.to(query.dtype).mT
        return of_queries, None if keys is None else key @ keys.to(key.dtype).mT

    def near_tables(self, window: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a window's rows of A, in the order of falling distances, and of τ B, of rising ones."""
        rows = self.index(torch.arange(1 - window, window, device=self.rows.device))
        queries = None if self.query_table is None else self.query_table[:, rows.flip(0)]
        return queries, None if self.key_table is None else self.key_table[:, rows]

    def sided(self, features: FeatureFunction, window: int, *, keys: bool, scaling: float) -> FeatureFunction:
        """Return the features of queries or keys, doubled and multiplied by the factors of either side."""

        def doubled(x: Tensor) -> Features:
            values, log_scale = features(x)
            factors = self.exponents(x, window, keys=keys, scaling=scaling).exp()
            return Features((values.unsqueeze(-2) * factors.unsqueeze(-1)).flatten(-2), log_scale)

        return doubled

    def exponents(self, x: Tensor, window: int, *, keys: bool, scaling: float) -> Tensor:
        """Return the logarithms of the factors of queries or keys `[B, H, l, d]` on either side, `[B, H, l, 2]`."""
        table = self.key_table if keys else self.query_table
        if table is None:
            return x.new_zeros(*x.shape[:3], 2)
        if not keys:
            x = self.moved(x * scaling)
        far = round(math.sqrt(window * max(len(self.rows) // 2, window)))
        rows = self.index(torch.tensor([far, -far], device=self.rows.device))
        exponents = x @ table[:, rows].to(x.dtype).mT
        return exponents.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)


def _products(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return `x_i · table[index_ij]` for x `[B, H, L, d]`, a table `[H, K, d]` and an index `[B, L, S]`."""
    if index.shape[2] <= FEW:
        return (x.unsqueeze(3) * table[:, index].transpose(0, 1)).sum(dim=-1)
    return (x @ table.transpose(-1, -2)).gather(-1, index.unsqueeze(1).expand(-1, x.shape[1], -1, -1))


def shifted(products: Tensor, window: int, first: int, count: int) -> Tensor:
    """Return `[…, c, count]` from the products of c tokens with the rows of a window, `[…, c, 2 w - 1]`.

    Entry (i, j) is that of column `first - i + j`, and zero where there is none: each row begins one column before the
    last one's, which is a view of the flattened tensor.
    """
    size = products.shape[-2]
    start, width = first - (size - 1), size + count  # the first column that any row needs, and how many there are
    columns = pad(products, (-start, start + width - (2 * window - 1)))
    flat = columns.flatten(-2)[..., size - 1 :]
    return flat[..., : size * (width - 1)].unflatten(-1, (size, width - 1))[..., :count]


def one_direction(values: Tensor, direction: int, dim: int = -1) -> Tensor:
    """Return doubled features, or sums of them, without those of the other direction: 0 for keys before their query."""
    halves = list(values.chunk(2, dim=dim))
    halves[1 - direction] = torch.zeros_like(halves[1 - direction])
    return torch.cat(halves, dim=dim)
