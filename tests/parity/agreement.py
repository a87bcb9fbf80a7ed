"""How closely two results must agree: as closely as plain arithmetic of that precision would.

The tolerance is never a chosen number. The formula is run once more with every operation in the
low precision; its error against float64 is what precision itself costs, and a backend may err at
most twice as much, plus one rounding of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.inputs import AttentionInputs

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Plain(AttentionInputs):
    """Inputs whose scores are computed in their own precision, however low."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.q.dtype


def assert_as_exact_as_plain(got: Named, plain: Named, truth: Named) -> None:
    """Every result is as near to the truth as plain arithmetic of its precision comes."""
    assert got.keys() == truth.keys()
    for name, value in got.items():
        assert_close(name, value, plain[name], truth[name])


def assert_close(name: str, got: Tensor, plain: Tensor, truth: Tensor) -> None:
    assert got.shape == truth.shape, f"{name}: shape {list(got.shape)}, not {list(truth.shape)}"
    wild = ~truth.isfinite()
    same_kind = torch.equal(got.double()[wild].nan_to_num(7.0), truth[wild].nan_to_num(7.0))
    assert same_kind, f"{name}: NaN and infinities differ"
    if bool(wild.all()):
        return
    got_error = _error(got, truth, wild)
    allowed = tolerance(got, plain, truth, wild)
    assert got_error <= allowed, f"{name}: error {got_error:.3g}, plain arithmetic {allowed:.3g}"


def tolerance(got: Tensor, plain: Tensor, truth: Tensor, wild: Tensor) -> float:
    plain_error = _error(plain, truth, wild)
    if got.dtype == torch.float64:
        # There is no truth beyond float64: plain float32 errs by the same sums, 2^29 times as
        # far, and here the truth errs too.
        plain_error *= 2 * 2.0**-29
    largest = float(truth[~wild].abs().max())
    return 2 * plain_error + torch.finfo(got.dtype).eps * largest + torch.finfo(got.dtype).tiny


def _error(value: Tensor, truth: Tensor, wild: Tensor) -> float:
    error = float((value.double() - truth)[~wild].abs().max())
    return math.inf if math.isnan(error) else error
