"""How closely two results must agree: as closely as plain arithmetic of that precision would.

The tolerance is never a chosen number. The formula is run once more with every operation in the
low precision; its error against float64 is what precision itself costs. The same sums in another
order err alike but not the same, so a backend may err up to four times as much as a whole and
eight times at any one entry, plus one rounding of the result.
"""

from __future__ import annotations

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


def errors(results: Named, truth: Named) -> Named:
    """How far results are from the truth, where the truth is finite."""
    assert results.keys() == truth.keys()
    found = {}
    for name, value in results.items():
        wanted = truth[name]
        shapes = f"{name}: shape {list(value.shape)}, not {list(wanted.shape)}"
        assert value.shape == wanted.shape, shapes
        wild = ~wanted.isfinite()
        same = torch.equal(value.double()[wild].nan_to_num(7.0), wanted[wild].nan_to_num(7.0))
        assert same, f"{name}: NaN and infinities differ"
        found[name] = (value.double() - wanted)[~wild]
    return found


def assert_as_exact(got: Named, truth: Named, plain_errors: list[Named]) -> None:
    """Every result is as near to the truth as plain arithmetic comes at worst in some draws."""
    for name, error in errors(got, truth).items():
        if not error.numel():
            continue
        dtype = got[name].dtype
        # There is no truth beyond float64: plain float32 errs by the same sums, 2^29 times as
        # far, and the truth errs as well.
        closer = 2 * 2.0**-29 if dtype == torch.float64 else 1.0
        finite = truth[name][truth[name].isfinite()]
        rounding = torch.full_like(error, torch.finfo(dtype).eps * float(finite.abs().max()))
        for kind, size, factor in (("whole", torch.Tensor.norm, 4), ("entry", _largest, 8)):
            plain = max(closer * float(size(draw[name])) for draw in plain_errors)
            allowed = factor * plain + float(size(rounding)) + torch.finfo(dtype).tiny
            found = float(size(error))
            assert found <= allowed, f"{name}: {kind} error {found:.3g}, allowed {allowed:.3g}"


def assert_close(name: str, got: Tensor, plain: Tensor, truth: Tensor) -> None:
    """One result against one plain run."""
    plain_errors = errors({name: plain}, {name: truth})
    assert_as_exact({name: got}, {name: truth}, [plain_errors])


def _largest(error: Tensor) -> Tensor:
    return error.abs().max()
