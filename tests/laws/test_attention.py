"""Laws of attention: what holds whatever the numbers, lengths and masks are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import biases, masks

BACKENDS = ("reference", "tiled")
every_backend = pytest.mark.parametrize("backend", BACKENDS)

MASKS = ("none", "causal", "start", "window", "padding", "documents", "keep")


@dataclass(frozen=True)
class Call:
    """A drawn call, in float64, where laws hold to the last digits."""

    B: int
    H: int
    G: int
    Q: int
    K: int
    kind: str
    seed: int
    extras: frozenset[str]

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        source = torch.Generator().manual_seed(1000 * salt + self.seed)
        return 2 * torch.randn(*shape, generator=source, dtype=torch.float64)

    @property
    def q(self) -> Tensor:
        return self.numbers(self.B, self.H, self.Q, 3, salt=1)

    @property
    def k(self) -> Tensor:
        return self.numbers(self.B, self.G, self.K, 3, salt=2)

    @property
    def v(self) -> Tensor:
        return self.numbers(self.B, self.G, self.K, 2, salt=3)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def mask(self) -> masks.Mask | None:
        source = torch.Generator().manual_seed(self.seed)
        match self.kind:
            case "causal":
                return masks.causal()
            case "start":
                return masks.causal(offset=0)
            case "window":
                return masks.window(2, 1)
            case "padding":
                return masks.padding(torch.randint(0, self.K + 1, (self.B,), generator=source))
            case "documents":
                return masks.documents(torch.randint(0, 2, (self.B, self.K), generator=source))
            case "keep":
                shape = (self.B, self.H, self.Q, self.K)
                return masks.keep(torch.rand(*shape, generator=source) < 0.6)
        return None

    @property
    def allowed(self) -> Tensor:
        shape = (self.B, self.H, self.Q, self.K)
        if self.mask is None:
            return torch.ones(shape, dtype=torch.bool)
        return self.mask.dense(self.Q, self.K).expand(shape)

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mask": self.mask}
        if "softcap" in self.extras:
            found["softcap"] = 3.0
        if "relative" in self.extras:
            found["bias"] = biases.relative(self.numbers(self.H, 5, salt=4))
        if "sink" in self.extras:
            found["sink"] = self.numbers(self.H, salt=5)
        return found

    def trace(self, backend: str, **changes: Any) -> regard.Trace:
        return regard.trace(*self.qkv, **(self.options | changes), backend=backend)


@st.composite
def calls(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = MASKS,
    extras: tuple[str, ...] = ("softcap", "relative"),
    lengths: tuple[int, int] = (1, 12),
) -> Call:
    G, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    K = draw(st.integers(*lengths))
    kind = draw(st.sampled_from(kinds))
    Q = draw(st.integers(1, K)) if kind == "documents" else draw(st.integers(*lengths))
    return Call(
        B=draw(st.integers(1, 3)),
        H=G * group,
        G=G,
        Q=Q,
        K=K,
        kind=kind,
        seed=draw(st.integers(0, 99)),
        extras=frozenset(e for e in extras if draw(st.booleans())),
    )


ANY = ("softcap", "relative", "sink")


@every_backend
@given(call=calls(extras=ANY))
def test_looking_never_changes_the_answer(backend: str, call: Call) -> None:
    out = regard.attention(*call.qkv, **call.options, backend=backend)
    assert_close(call.trace(backend).out, out)


@every_backend
@given(call=calls())
def test_entropy_lies_between_certainty_and_evenness(backend: str, call: Call) -> None:
    entropy = call.trace(backend).entropy
    most = call.allowed.sum(-1).clamp_min(1).double().log()
    assert (entropy >= -1e-12).all()
    assert (entropy <= most + 1e-12).all()


@every_backend
@given(call=calls(extras=("relative",)))
def test_even_weights_have_the_largest_entropy(backend: str, call: Call) -> None:
    t = regard.trace(0 * call.q, call.k, call.v, mask=call.mask, backend=backend)
    assert_close(t.entropy, call.allowed.sum(-1).clamp_min(1).double().log())


@every_backend
@given(call=calls(extras=ANY))
def test_entropy_is_that_of_the_weights(backend: str, call: Call) -> None:
    t = call.trace(backend)
    p = t.weights()
    rest = 1 - p.sum(-1, keepdim=True)
    if "sink" in call.extras:
        p = torch.cat([p, rest.clamp_min(0)], -1)
    assert_close(t.entropy, torch.special.entr(p).sum(-1), atol=1e-7, rtol=1e-7)


@every_backend
@given(call=calls())
def test_rows_sum_to_one_or_to_nothing(backend: str, call: Call) -> None:
    weights = call.trace(backend).weights()
    assert_close(weights.sum(-1), call.allowed.any(-1).double())
    assert not weights[~call.allowed].any()


@every_backend
@given(call=calls())
def test_what_keys_receive_is_what_rows_give(backend: str, call: Call) -> None:
    t = call.trace(backend)
    given = call.allowed.any(-1).double().sum(-1)
    assert_close(t.received().sum(-1), given)
    assert_close(t.received(), t.weights().sum(-2))


@every_backend
@given(call=calls(extras=ANY))
def test_the_output_is_the_weighted_mean_of_values(backend: str, call: Call) -> None:
    t = call.trace(backend)
    values = call.v.repeat_interleave(call.H // call.G, dim=1)
    assert_close(t.out, t.weights() @ values)


@every_backend
@given(call=calls(kinds=("none",), extras=("softcap",)))
def test_the_order_of_keys_does_not_matter(backend: str, call: Call) -> None:
    order = torch.randperm(call.K, generator=torch.Generator().manual_seed(call.seed))
    one = call.trace(backend)
    other = regard.trace(
        call.q, call.k[:, :, order], call.v[:, :, order], **call.options, backend=backend
    )
    for name in ("out", "lse", "entropy", "max_logit"):
        assert_close(getattr(other, name), getattr(one, name))
    assert_close(other.received(), one.received()[..., order])


@every_backend
@given(call=calls(kinds=("none", "causal", "padding", "keep"), extras=ANY))
def test_batch_slots_do_not_matter(backend: str, call: Call) -> None:
    whole = call.trace(backend)
    allowed = masks.keep(call.allowed) if call.mask is not None else None
    for b in range(call.B):
        alone = [t[b : b + 1] for t in call.qkv]
        mask = None if allowed is None else masks.keep(call.allowed[b : b + 1])
        t = regard.trace(*alone, **(call.options | {"mask": mask}), backend=backend)
        assert_close(t.out, whole.out[b : b + 1])
        assert_close(t.lse, whole.lse[b : b + 1])


Partial = tuple[Tensor, Tensor]


def merged(one: Partial, other: Partial) -> Partial:
    """Two parts of the keys as one: outputs weighted by what each part's keys sum to."""
    lse = torch.logaddexp(one[1], other[1])
    seen = lse > -math.inf
    shares = [
        torch.where(seen, torch.exp(p[1] - torch.where(seen, lse, 0.0)), 0.0) for p in (one, other)
    ]
    return sum(s[..., None] * p[0] for s, p in zip(shares, (one, other), strict=True)), lse  # type: ignore[return-value]


@every_backend
@given(
    call=calls(kinds=("none", "keep", "padding"), extras=("softcap",), lengths=(3, 12)),
    data=st.data(),
)
def test_parts_merge_into_the_whole(backend: str, call: Call, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, call.K - 2))
    second = data.draw(st.integers(first + 1, call.K - 1))

    def part(keys: slice) -> Partial:
        t = regard.trace(
            call.q, call.k[:, :, keys], call.v[:, :, keys],
            **(call.options | {"mask": masks.keep(call.allowed[..., keys])}), backend=backend,
        )  # fmt: skip
        return t.out, t.lse

    a, b, c = part(slice(0, first)), part(slice(first, second)), part(slice(second, None))
    whole = call.trace(backend)
    for out, lse in (merged(merged(a, b), c), merged(a, merged(b, c)), merged(merged(c, a), b)):
        assert_close(out, whole.out)
        assert_close(lse, whole.lse)


@every_backend
@given(call=calls(extras=()), constant=st.sampled_from([-40.0, -1.5, 0.25, 300.0]))
def test_a_constant_shifts_only_lse(backend: str, call: Call, constant: float) -> None:
    even = torch.full((call.Q, call.K), constant, dtype=torch.float64)
    plain, shifted = call.trace(backend), call.trace(backend, bias=biases.dense(even))
    assert_close(shifted.out, plain.out)
    assert_close(shifted.entropy, plain.entropy)
    assert_close(shifted.lse, plain.lse + constant)
    assert_close(shifted.max_logit, plain.max_logit + constant)
    assert_close(shifted.received(), plain.received())


@every_backend
@given(call=calls(), rows=st.integers(1, 15), columns=st.integers(1, 15))
def test_a_map_loses_no_weight(backend: str, call: Call, rows: int, columns: int) -> None:
    t = call.trace(backend)
    total = t.map((rows, columns), pool="sum")
    assert total.shape[2:] == (min(rows, call.Q), min(columns, call.K))
    assert_close(total.sum((-1, -2)), call.allowed.any(-1).double().sum(-1))
    assert_close(t.map((rows, columns), pool="max").amax((-1, -2)), t.weights().amax((-1, -2)))


@every_backend
@given(call=calls(extras=ANY), pool=st.sampled_from(["mean", "max", "sum"]))
def test_a_map_of_single_places_is_the_weights(backend: str, call: Call, pool: Any) -> None:
    t = call.trace(backend)
    assert_close(t.map((call.Q, call.K), pool=pool), t.weights())
    assert_close(t.map(99, pool=pool), t.weights())


@every_backend
@given(call=calls(), data=st.data())
def test_zooming_shows_the_weights_of_the_region(
    backend: str, call: Call, data: st.DataObject
) -> None:
    t = call.trace(backend)
    q0, k0 = data.draw(st.integers(0, call.Q - 1)), data.draw(st.integers(0, call.K - 1))
    q1 = data.draw(st.integers(q0 + 1, call.Q))
    k1 = data.draw(st.integers(k0 + 1, call.K))
    close = t.map(99, queries=(q0, q1), keys=(k0, k1))
    assert_close(close, t.weights()[..., q0:q1, k0:k1])


@every_backend
@given(
    call=calls(lengths=(8, 8), kinds=("none", "causal", "window", "keep", "padding")),
    coarse=st.sampled_from([1, 2, 4]),
)
def test_pooling_a_fine_map_gives_the_coarse_one(backend: str, call: Call, coarse: int) -> None:
    t, by = call.trace(backend), 8 // coarse
    fine = {pool: t.map(8, pool=pool) for pool in ("mean", "max", "sum")}

    def pooled(pool: str, reduce: Any) -> Tensor:
        return reduce(fine[pool].unflatten(-1, (coarse, by)).unflatten(-3, (coarse, by)), (-3, -1))

    assert_close(t.map(coarse, pool="mean"), pooled("mean", torch.mean))
    assert_close(t.map(coarse, pool="sum"), pooled("sum", torch.sum))
    assert_close(t.map(coarse, pool="max"), pooled("max", torch.amax))


@every_backend
@given(call=calls(extras=ANY), n=st.integers(1, 14))
def test_the_strongest_keys_are_those_that_sorting_finds(backend: str, call: Call, n: int) -> None:
    t = call.trace(backend)
    top, weights = t.top(n), t.weights()
    n = min(n, call.K)
    assert_close(top.values, weights.sort(-1, descending=True).values[..., :n])
    seen = top.indices >= 0
    count = call.allowed.sum(-1, keepdim=True)
    assert torch.equal(seen, (torch.arange(n) < count).expand_as(seen))
    assert_close(weights.gather(-1, top.indices.clamp_min(0))[seen], top.values[seen])
    assert call.allowed.gather(-1, top.indices.clamp_min(0))[seen].all()
    assert not top.values[~seen].any()


@every_backend
@given(call=calls(), data=st.data())
def test_mass_is_what_some_keys_get(backend: str, call: Call, data: st.DataObject) -> None:
    t = call.trace(backend)
    assert_close(t.mass(slice(None)), call.allowed.any(-1).double())
    some = data.draw(st.lists(st.integers(0, call.K - 1), min_size=1, unique=True))
    others = torch.ones(call.K, dtype=torch.bool)
    others[some] = False
    assert_close(t.mass(some), t.weights()[..., some].sum(-1))
    assert_close(t.mass(some) + t.mass(others), t.mass(slice(None)))


@every_backend
@given(call=calls(extras=("relative",)))
def test_a_huge_soft_cap_is_none(backend: str, call: Call) -> None:
    plain, capped = call.trace(backend), call.trace(backend, softcap=1e7)
    assert_close(capped.out, plain.out)
    assert_close(capped.lse, plain.lse)
    assert_close(capped.entropy, plain.entropy)


@every_backend
@given(call=calls(), cap=st.sampled_from([0.5, 2.0]))
def test_a_soft_cap_bounds_the_logits(backend: str, call: Call, cap: float) -> None:
    t = call.trace(backend, softcap=cap, bias=None)
    seen = call.allowed.any(-1)
    assert (t.max_logit[seen].abs() <= cap).all()


@every_backend
@given(call=calls())
def test_a_sink_nobody_sees_is_none(backend: str, call: Call) -> None:
    plain = call.trace(backend)
    sunk = call.trace(backend, sink=torch.full((call.H,), -1e4, dtype=torch.float64))
    assert_close(sunk.out, plain.out)
    assert_close(sunk.entropy, plain.entropy)
    seen = call.allowed.any(-1)
    assert_close(sunk.lse[seen], plain.lse[seen])


@every_backend
@given(call=calls(), more=st.floats(0.1, 5))
def test_a_larger_sink_leaves_less_for_the_keys(backend: str, call: Call, more: float) -> None:
    small = call.numbers(call.H)
    less, most = (call.trace(backend, sink=s).mass(slice(None)) for s in (small + more, small))
    seen = call.allowed.any(-1)
    assert (less[seen] < most[seen]).all()
    assert (most[seen] < 1).all()
    assert not less[~seen].any()
    # The sink divides what is left: p shrinks by 1 / (1 + exp(sink - lse)).
    lse = call.trace(backend).lse
    assert_close(most, torch.sigmoid(lse - small[:, None]))


@every_backend
@given(call=calls(kinds=("none", "causal", "window"), extras=()))
def test_inputs_without_heads_or_batch_are_one_head(backend: str, call: Call) -> None:
    four = [t[:, :1] for t in call.qkv]
    whole = regard.trace(*four, mask=call.mask, backend=backend)
    for less in (lambda t: t[:, 0], lambda t: t[0, 0]):
        part = regard.trace(*(less(t) for t in four), mask=call.mask, backend=backend)
        assert_close(part.out, less(whole.out))
        assert_close(
            regard.attention(*(less(t) for t in four), mask=call.mask, backend=backend), part.out
        )
        for name in ("lse", "entropy", "max_logit", "mean_logit"):
            assert_close(getattr(part, name), less(getattr(whole, name)))
        for ask in (
            lambda t: t.weights(),
            lambda t: t.received(),
            lambda t: t.map(3),
            lambda t: t.top(2).values,
            lambda t: t.top(2).indices,
            lambda t: t.mass(0),
        ):
            assert_close(ask(part), less(ask(whole)))
