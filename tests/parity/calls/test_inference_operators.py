"""Compiled calls of which nothing is learned have operators of their own: that these keep what they
promise to the compiler, and that nobody who learns is given one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import masks
from regard.backends.passes import taken_apart
from regard.backends.tiled.fused import _has_loop
from regard.inputs import check
from tests.parity import cases
from tests.parity.calls.call import draw
from tests.parity.cases import DEFAULTS

TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
pytestmark = [
    pytest.mark.compiled,
    # The compiler deprecates parts of itself while it works.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


def three(n: int = 9) -> list[Tensor]:
    return [draw(2, h, n, 8, seed=i) for i, h in enumerate((4, 2, 2))]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=masks.causal())


def look(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(regard.trace(q, k, v, mask=masks.causal()).rows)


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("laid", ["plain", "transposed"])
@pytest.mark.parametrize("name", ["tiled", TRITON])
def test_the_operator_keeps_its_promises(name: str, laid: str, statistics: bool) -> None:
    if name == "triton":
        import regard.backends.triton.operators  # noqa: F401 - registers it
    tensors = three()
    if laid == "transposed":
        # As a projection is split into heads; and with the width not the last axis in memory.
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        tensors[1] = tensors[1].mT.contiguous().mT
    told, _ = taken_apart(check(*tensors, **(DEFAULTS | {"mask": masks.causal()})))
    operator = getattr(torch.ops.regard, f"{name}_inference").default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (*tensors, *told.told[:4], statistics), test_utils=tests)


def operators_in(program: torch.fx.GraphModule) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def test_whoever_learns_later_gets_another_graph() -> None:
    found: list[set[str]] = []

    def keep(graph: torch.fx.GraphModule, tensors: list[Tensor]) -> Any:
        found.append(operators_in(graph))
        return graph.forward

    compiled = torch.compile(look, fullgraph=True, backend=keep)
    plain = three()
    with torch.no_grad():
        assert_close(compiled(*plain), look(*plain))
    learned, wanted = ([t.clone().requires_grad_() for t in plain] for _ in range(2))
    with torch.no_grad():
        compiled(*learned)
    compiled(*learned)[0].square().sum().backward()
    look(*wanted)[0].square().sum().backward()
    for one, other in zip(learned, wanted, strict=True):
        assert_close(one.grad, other.grad)
    assert any("_inference" in name for name in found[0])
    assert not any("_inference" in name for name in found[-1])


class Looks(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return look(q, k, v)


class Attends(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("module", [Looks, Attends])
def test_a_program_that_is_exported_may_learn(module: type[torch.nn.Module], strict: bool) -> None:
    """Wherever it was exported, it runs elsewhere, perhaps to be trained."""
    with torch.no_grad():
        program = torch.export.export(module(), tuple(three()), strict=strict)
    names = operators_in(program.graph_module)
    assert not any("_inference" in name for name in names)
    if module is Attends and cases.DEVICE == "cpu":
        assert not any("regard" in name for name in names)
    learned, wanted = ([t.requires_grad_() for t in three()] for _ in range(2))
    for run, tensors in ((program.module(), learned), (module(), wanted)):
        found = run(*tensors)
        (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    for one, other in zip(learned, wanted, strict=True):
        assert_close(one.grad, other.grad)


@pytest.mark.skipif(cases.DEVICE != "cpu", reason="the loop is for CPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_call_takes_the_loop_that_a_plain_one_takes(dtype: torch.dtype) -> None:
    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, tensors: list[Tensor]) -> Any:
        found.extend(operators_in(graph))
        return graph.forward

    tensors = [t.to(dtype) for t in three(33)]
    torch.compile(attend, fullgraph=True, backend=keep)(*tensors)
    plainly = regard.plan(*tensors, mask=masks.causal()).backend
    assert ("regard.tiled_inference.default" in found) == (plainly == "tiled")
    assert dtype != torch.float32 or (plainly == "tiled") == _has_loop()
