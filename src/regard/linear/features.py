"""Feature maps: what queries and keys become before they are compared by a dot product.

A map is a function from vectors to vectors of numbers of 0 or more. Of those that are made of
exponentials only ratios matter, so each row of queries, and all keys together, are divided by their
largest feature: nothing overflows, and the factor cancels in every weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError
from regard.scores.score import positive
from regard.values import Value, whole

FeatureMap = Callable[[Tensor], Tensor]


def elu_plus_one(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """elu(x) + 1: above 0 everywhere, x + 1 for x > 0.

    >>> import torch
    >>> elu_plus_one(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    # Written out: the compiler is told wrong strides for the gradient of PyTorch's elu (2.13).
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def as_it_is(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The map of what are features already."""
    return x


@dataclass(frozen=True, eq=False, repr=False)
class RandomFeatures(Value):
    """exp(w·x - |x|²/2) / √M for M random vectors w, x being scaled: their products are exp(q·k) on
    average. Vectors are drawn orthogonal, as many at a time as x is wide."""

    projection: Tensor
    scale: float

    def __call__(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any m"]:
        return self.exponents(x).exp() / math.sqrt(len(self.projection))

    def exponents(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any m"]:
        """w·x - |x|²/2 of every w."""
        if x.shape[-1] != self.projection.shape[-1]:
            raise RegardError(
                "random features are drawn for one width",
                got=f"features of width {self.projection.shape[-1]}, heads {x.shape[-1]} wide",
                do=f"linear.random_features({x.shape[-1]}, ...)",
            )
        x = x * math.sqrt(self.scale)
        return x @ self.projection.to(x).mT - x.square().sum(-1, keepdim=True) / 2

    def __repr__(self) -> str:
        count, width = self.projection.shape
        return f"random_features({width}, {count})"


def random_features(
    width: int, count: int = 256, *, seed: int = 0, scale: float | None = None
) -> RandomFeatures:
    """Positive orthogonal random features (FAVOR+): `count` of them for heads `width` wide. With
    them linear attention approximates softmax attention with `scale` (1/√width unless said), the
    better the more there are and the smaller its logits.

    >>> import torch
    >>> features = random_features(8, 4096)
    >>> q, k = 0.5 * torch.ones(8), torch.linspace(-1, 1, 8)
    >>> bool(abs(features(q) @ features(k) - (q @ k / 8**0.5).exp()) < 0.1)
    True
    """
    if min(whole("random_features: width", width), whole("random_features: count", count)) < 1:
        raise RegardError(
            "random features need a width and a count", got=f"{width}, {count}", accepted="1 up"
        )
    scale = width**-0.5 if scale is None else positive("scale", scale)
    source = torch.Generator().manual_seed(whole("random_features: seed", seed))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    turned = [torch.linalg.qr(draw(width, width))[0] for _ in range(-(-count // width))]
    directions = torch.cat(turned)[:count]
    # As long as vectors of independent numbers would be: orthogonal, and each of them Gaussian.
    lengths: Tensor = torch.linalg.vector_norm(draw(count, width), dim=-1, keepdim=True)
    return RandomFeatures((directions * lengths).to(torch.float32), float(scale))


def refuse_no_map(features: object) -> None:
    """Unless it can be called."""
    if not callable(features):
        raise RegardError(
            "features are made by a function",
            got=described(features),
            accepted="linear.elu_plus_one, torch.relu, linear.random_features(width, count), or a "
            "function of tensors",
        )


def is_fixed(features: FeatureMap) -> bool:
    """Whether a map is known to learn nothing, so that it can be run again in the backward pass."""
    return isinstance(features, RandomFeatures) or features in (as_it_is, elu_plus_one, torch.relu)


def of_queries(features: FeatureMap, q: Float[Tensor, "*any d"]) -> Float[Tensor, "*any m"]:
    """Features of queries, up to a factor for each."""
    if not isinstance(features, RandomFeatures):
        return features(q)
    found = features.exponents(q)
    return (found - found.detach().amax(-1, keepdim=True)).exp()


def of_keys(
    features: FeatureMap,
    k: Float[Tensor, "b g k d"],
    shift: Float[Tensor, "b g 1 1"] | None,
    seen: Bool[Tensor, "b 1 k 1"] | None,
) -> Float[Tensor, "b g k m"]:
    """Features of keys, divided by exp(shift); 0 where a key is not seen."""
    k = k if seen is None else torch.where(seen, k, 0.0)
    if isinstance(features, RandomFeatures):
        assert shift is not None
        found = (features.exponents(k) - shift).exp()
    else:
        found = features(k)
    return found if seen is None else torch.where(seen, found, 0.0)


def largest(
    features: FeatureMap, k: Float[Tensor, "b g k d"], seen: Bool[Tensor, "b 1 k 1"] | None
) -> Float[Tensor, "b g 1 1"] | None:
    """The largest exponent of each head's keys, for maps that have such; -inf if there is none."""
    if not isinstance(features, RandomFeatures):
        return None
    best = k.new_full((*k.shape[:2], 1, 1), -math.inf)
    k = k.detach()
    for start in range(0, k.shape[2], 1024):
        part = slice(start, start + 1024)
        here = k[:, :, part] if seen is None else torch.where(seen[:, :, part], k[:, :, part], 0.0)
        found = features.exponents(here).amax(-1, keepdim=True)
        if seen is not None:
            found = torch.where(seen[:, :, part], found, -math.inf)
        best = torch.maximum(best, found.amax(2, keepdim=True))
    return best
