"""The Triton kernels as they are set for real calls, in memory full of NaN, on odd lengths.

What a kernel forgets to write, or reads past an end, shows up as NaN (127 in a table of flags).
Long cases run on a GPU only (--device cuda).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from regard.backends.reference import ReferencePass
from tests.parity import cases
from tests.parity.cases import Case, Sizes, assert_conforms, observed, truth_and_plain

pytestmark = pytest.mark.interpreted

LENGTHS = (63, 111, 1000)
WIDTHS = (64, 80, 128)
MASKED = ("none", "causal", "causal_window", "causal_padding", "documents")
INTERPRETED = 63
"""The longest case that is run without a GPU."""


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, and the largest number where it holds integers."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Some of PyTorch's own kernels say that they are not deterministic, which is not asked.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def odd_cases() -> list[Case]:
    """Every mask meets every length, and widths and lengths take turns so that all meet."""
    found = []
    for i, n in enumerate(LENGTHS):
        for j, mask in enumerate(MASKED):
            D = WIDTHS[(i + j) % len(WIDTHS)]
            sizes = Sizes(B=2, H=4, G=2, Q=n, K=n, D=D, E=D)
            found.append(Case(mask, dtype=torch.bfloat16, sizes=sizes))
    wide = Sizes(B=1, H=2, G=1, Q=111, K=1000, D=256, E=128)
    step = Sizes(B=2, H=8, G=2, Q=1, K=1000, D=128, E=128)
    found += [
        Case("causal", dtype=torch.float16, sizes=wide),
        Case("causal_padding", dtype=torch.float32, sizes=Sizes(Q=111, K=111, D=80, E=64)),
        Case("causal", dtype=torch.bfloat16, sizes=step),
        Case("causal_padding", dtype=torch.bfloat16, sizes=step),
    ]
    return found


def name(case: Case) -> str:
    s = case.sizes
    return f"{case.mask}-{s.Q}x{s.K}-width{s.D}-{str(case.dtype).removeprefix('torch.')}"


@pytest.mark.usefixtures("poisoned")
def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(9, device=cases.DEVICE).isnan().all()
    assert (torch.empty(9, dtype=torch.int8, device=cases.DEVICE) == 127).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", odd_cases(), ids=name)
def test_kernels_in_poisoned_memory(case: Case) -> None:
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    if cases.DEVICE == "cpu" and case.sizes.K > INTERPRETED:
        pytest.skip("too long to interpret")
    inputs, learned = case.build()
    got = observed(Triton(), inputs, learned, TritonPass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_one_key_in_poisoned_memory(mask: str) -> None:
    """Plain arithmetic happens to be exact here, so it cannot say what precision costs."""
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    D = 80
    case = Case(mask, dtype=torch.bfloat16, sizes=Sizes(B=2, H=2, G=2, Q=1, K=1, D=D, E=D))
    inputs, learned = case.build()
    got = observed(Triton(), inputs, learned, TritonPass())
    truth, _ = truth_and_plain(case, ReferencePass())
    # Slopes and gradients are rounded (cut off, when interpreted) to bfloat16 one after the other.
    # Those of q and k hold sums of D products that cancel.
    low, high = (torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float32))
    rounding = {"rtol": 2 * low, "atol": D * high}
    for name, value in got.items():
        torch.testing.assert_close(value.double(), truth[name], **rounding)
