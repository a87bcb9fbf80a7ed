"""The checker of shapes itself: what is wrong is found, and told by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Float32, Shaped, TypeCheckError, _storage
from torch import Tensor, nn

pytest.importorskip("beartype")

from tests import shapes

checked = shapes.jaxtyped(typechecker=shapes.check)


@checked
def rows(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], less: int = 0) -> Float[Tensor, " n"]:
    return (x * y).sum(-1)[less:]


@checked
def scaled(x: float, *more: int, **named: str) -> float:
    return x if not more else "no number"  # type: ignore[return-value]


@checked
@dataclass
class Pair:
    q: Float[Tensor, "n d"]
    k: Float[Tensor, "m d"]

    @checked
    def __eq__(self, other: object) -> bool:
        return NotImplemented

    @property
    @checked
    def logits(self) -> Float[Tensor, "n m"]:
        return self.q @ self.k.mT

    @staticmethod
    @checked
    def of(x: Float[Tensor, "n d"]) -> Pair:
        return Pair(x, x)


@checked
def each(x: Float[Tensor, "n d"]) -> Iterator[Tensor]:
    yield from x


@checked
def refuse(why: str) -> NoReturn:
    raise ValueError(why)


X, Y = torch.ones(3, 2), torch.ones(4, 2)


def test_what_is_right_passes() -> None:
    assert rows(X, y=X).tolist() == [2.0, 2.0, 2.0]
    assert scaled(2) == 2, "an int is a float"
    assert Pair(X, Y).logits.shape == (3, 4)
    assert Pair.of(X) != Pair.of(X)
    assert [len(row) for row in each(X)] == [2, 2, 2]
    with pytest.raises(ValueError, match="because"):
        refuse("because")
    # Each call has axes of its own.
    assert rows(Y, Y).shape == (4,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rows(X, Y), "parameters of .*rows.*parameter 'y'"),
        (lambda: rows(X.long(), X.long()), "parameters of .*rows.*parameter 'x'"),
        (lambda: rows(X, X, less="1"), "parameters of .*rows.*parameter 'less'"),
        (lambda: rows(X, X, 1), "rows returned what it may not.\nThe current .*\nn=3\nd=2"),
        (lambda: scaled("1"), "parameters of .*scaled.*parameter 'x'"),
        (lambda: scaled(1.0, "2"), "parameters of .*scaled"),
        (lambda: scaled(1.0, name=2), "parameters of .*scaled"),
        (lambda: scaled(1.0, 2), "scaled returned what it may not"),
        (lambda: Pair(X, torch.ones(3, 5)), "parameters of .*Pair.*parameter 'k'"),
        (lambda: Pair.of(X[0]), "parameters of .*Pair.of.*parameter 'x'"),
        (lambda: refuse(1), "parameters of .*refuse.*parameter 'why'"),
        (lambda: each(X[0]), "parameters of .*each.*parameter 'x'"),
    ],
)
def test_what_is_wrong_is_found(call: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeCheckError, match=f"(?s){said}"):
        call()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    try:
        call()
    except TypeCheckError:
        pytest.fail("checked where checks are switched off")
    except (RuntimeError, TypeError, ValueError):
        pass


def test_arguments_that_do_not_fit_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        rows(X)  # type: ignore[call-arg]


KINDS = [Float[Tensor, "n d"], Float32[Tensor, "n d"], Bool[Tensor, "n d"], Shaped[Tensor, "n d"],
         Float[np.ndarray, "n d"], Float[nn.Parameter, "n d"]]  # fmt: skip
AXES = [
    "",
    "n",
    "n d",
    "d n",
    "m d",
    "n n",
    "n m d",
    "_ n",
    "2 n",
    "#n d",
    "... n",
    "*n d",
    "n n+1",
]
VALUES = [None, 1.0, np.ones((2, 3)), nn.Parameter(X), X.bfloat16(), X.long(), X > 0, torch.ones(3),
          torch.tensor(1.0), X, X.mT, X[:2], X[:1], X[:, :1], X[None], X[:0]]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, *(Float[Tensor, axes] for axes in AXES)])
def test_values_are_what_jaxtyping_says_they_are(kind: Any) -> None:
    """Alone, and after another whose axes are known; and as much is known of axes afterwards."""

    def found(asked: Any, *pairs: tuple[Any, Any]) -> list[Any]:
        said: list[Any] = []
        _storage.push_shape_memo({})
        for annotation, value in pairs:
            try:
                said.append(asked(annotation, value))
            except jaxtyping.AnnotationError as error:
                said.append(str(error))
        said.append(_storage.get_shape_memo())
        _storage.pop_shape_memo()
        return said

    for value, (first, before) in product(VALUES, product([Float[Tensor, "n d"], kind], VALUES)):
        pairs = (first, before), (kind, value)
        assert found(shapes.is_such, *pairs) == found(shapes.asked, *pairs)
