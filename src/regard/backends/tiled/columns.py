"""Keys and values as the columns of a matrix, for products with rows of queries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

ON_ARM = bool(getattr(torch._C, "_has_mkldnn_acl", False))
"""Whether oneDNN multiplies with Arm's library, which takes about 0.1 ms for each matrix of a batch
that is a transposed view: up to nine times as long as the product itself."""


ROWS = 16
"""Of a matrix with fewer rows oneDNN leaves the product to others, which take views as they are."""


def columns(t: Float[Tensor, "*any n d"], rows: int) -> Float[Tensor, "*any d n"]:
    """The transpose, copied where the product of so many rows with a view of it is slow."""
    slow = ON_ARM and rows >= ROWS and t.device.type == "cpu" and t.dtype == torch.float32
    return t.mT.contiguous() if slow else t.mT
