"""A file of the first version still opens, and says what it said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard.backends.reference import Reference

# Written on 15 November 2026 by regard 0.1.0.dev0, with every kind of thing that a trace holds.
FILE = Path(__file__).with_name("first_version.regard")
KINDS = {
    "causal": "mask=causal()",
    "grouped": "bfloat16 on cpu, mask=window(2, 1), scale=0.3",
    "documents": "mask=causal() & documents([0, 0, 1, 1, 1, 2]), softcap=2",
    "padding": "mask=padding([3]), a sink per head",
    "alibi": "bias=alibi",
    "additive": "width 3",
}


@pytest.mark.parametrize("path", KINDS)
def test_traces_are_what_they_were(path: str) -> None:
    with regard.load(FILE) as file:
        trace = file[path].trace
        assert KINDS[path] in repr(trace)
        x = trace.inputs
        wide = replace(x, q=x.q.float(), k=x.k.float(), v=x.v.float())
        now = Reference().observe(wide)
        for name in ("lse", "entropy", "max_logit"):
            torch.testing.assert_close(getattr(trace, name), getattr(now, name), msg=name)
        rough = x.q.dtype == torch.bfloat16
        torch.testing.assert_close(
            trace.out.float(), now.out, atol=0.02 if rough else 1e-5, rtol=0.02 if rough else 1e-5
        )
        shares = trace.weights().sum(-1)
        assert (
            (shares <= 1.0001).all() if path == "padding" else shares.allclose(shares.new_ones(()))
        )


def test_tokens_and_layers() -> None:
    with regard.load(FILE) as file:
        assert list(file) == list(KINDS)
        assert file.tokens == ["To", " read", " is", " to", " look"]
