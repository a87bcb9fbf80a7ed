"""The kernels of gated linear attention and the delta rule against the recurrence, token by token
in float64, forward and backward: interpreted on a CPU (TRITON_INTERPRET=1), or on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard import RegardError, linear, masks
from tests.parity import cases
from tests.parity.agreement import Named, assert_as_exact, errors

pytestmark = pytest.mark.interpreted

NAMES = ("q", "k", "v", "log_decay", "beta", "start")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Sizes(NamedTuple):
    """Batch entries, query and key heads, tokens, and both widths."""

    B: int = 1
    H: int = 2
    G: int = 1
    N: int = 70
    D: int = 8
    E: int = 5


def draw(s: Sizes, rule: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor | None]:
    """All that a call can be given, and gradients of output and last state. Some decays leave
    nothing or all, some rates are 0 or 1."""
    source = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, draw: Any = torch.randn) -> Tensor:
        found: Tensor = draw(shape, generator=source, dtype=torch.float64)
        return found

    k = torch.nn.functional.normalize(numbers(s.B, s.G, s.N, s.D), dim=-1)
    log_decay, beta = (numbers(s.B, s.G, s.N, draw=torch.rand) for _ in range(2))
    log_decay = -3 * log_decay.square()
    for first in range(0, s.N, 40):
        log_decay[..., first + 9 : first + 14] = 0.0
        log_decay[..., first + 30 : first + 31] = -torch.inf
        beta[..., first + 3 : first + 5], beta[..., first + 7 : first + 10] = 0.0, 1.0
    found = {
        "q": numbers(s.B, s.H, s.N, s.D), "k": k, "v": numbers(s.B, s.G, s.N, s.E),
        "log_decay": log_decay if "gated" in rule else None,
        "beta": beta if "delta" in rule else None,
        "start": numbers(s.B, s.G, s.D, s.E),
        "g": numbers(s.B, s.H, s.N, s.E), "g_last": numbers(s.B, s.G, s.D, s.E),
    }  # fmt: skip
    kinds = {"start": F32, "g_last": F32}
    return {
        name: None if t is None else t.to(kinds.get(name, dtype)).to(cases.DEVICE)
        for name, t in found.items()
    }


def answers(given: dict[str, Tensor | None], run: Any) -> Named:
    """Output, last state, and gradients of everything."""
    inputs = {
        name: given[name].detach().requires_grad_()  # type: ignore[union-attr]
        for name in NAMES
        if given[name] is not None
    }
    out, last = run(**{name: inputs.get(name) for name in NAMES})
    pulls = given["g"].to(out.dtype), given["g_last"].to(last.dtype)  # type: ignore[union-attr]
    grads = torch.autograd.grad((out, last), list(inputs.values()), pulls)
    found = {"out": out, "last": last, **dict(zip(inputs, grads, strict=True))}
    return {name: t.detach().cpu() for name, t in found.items()}


def by_tokens(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, start: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after the other, every operation in the precision of the tensors."""
    state, outs = start.to(q.dtype), []
    for i in range(q.shape[2]):
        if log_decay is not None:
            state = state * log_decay[:, :, i, None, None].exp()
        key, new = k[:, :, i, :, None], v[:, :, i, None]
        if beta is not None:
            new = beta[:, :, i, None, None] * (new - key.mT @ state)
        state = state + key * new
        read = state.repeat_interleave(q.shape[1] // k.shape[1], 1)
        outs.append(q[:, :, i, None] * q.shape[-1] ** -0.5 @ read)
    return torch.cat(outs, 2), state


def called(backend: str, mask: Any = None) -> Any:
    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Any, beta: Any, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        state = linear.State(start, kind="gated" if beta is None else "delta")
        how: dict[str, Any] = {"state": state, "backend": backend, "mask": mask}
        if beta is None:
            return linear.gated(q, k, v, log_decay, **how), state.sums  # type: ignore[return-value]
        return linear.delta(q, k, v, beta, log_decay, **how), state.sums  # type: ignore[return-value]

    return run


def double(given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.double() for name, t in given.items()}


def assert_right(s: Sizes, rule: str, dtype: torch.dtype) -> None:
    plain = []
    for seed in (0, 1):
        given = draw(s, rule, dtype, seed)
        truth = answers(double(given), by_tokens)
        plain.append(errors(answers(given, by_tokens), truth))
    given = draw(s, rule, dtype)
    got = answers(given, called("triton"))
    assert {name: t.dtype for name, t in got.items()} == {
        name: F32 if name in ("last", "start") else dtype for name in got
    }
    assert_as_exact(got, answers(double(given), by_tokens), plain)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk in each segment."""
    from regard.backends.triton.recurrent import passes

    monkeypatch.setattr(passes, "segment_of", lambda *_, delta: 1)


@pytest.mark.parametrize("rule", ["gated", "delta", "gated delta"])
@pytest.mark.parametrize(("dtype", "D", "E"), [(F32, 8, 5), (BF16, 20, 17), (F16, 16, 3)], ids=str)
def test_kernels(rule: str, dtype: torch.dtype, D: int, E: int) -> None:
    assert_right(Sizes(D=D, E=E), rule, dtype)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("rule", ["gated", "gated delta"])
def test_segments_side_by_side(rule: str) -> None:
    """Three of them; and with the delta rule several blocks of columns."""
    assert_right(Sizes(H=1, N=135, D=33, E=36), rule, F32)


def test_keys_that_are_alike() -> None:
    """All the same, each written whole: a triangular system whose powers are far from 0."""
    given = draw(Sizes(H=1, N=64), "delta", F32)
    given["k"] = given["k"][:, :, :1].expand_as(given["k"]).contiguous()  # type: ignore[index, arg-type]
    given["beta"] = torch.ones_like(given["beta"])  # type: ignore[arg-type]
    truth = answers(double(given), by_tokens)
    plain = errors(answers(given, by_tokens), truth)
    assert_as_exact(answers(given, called("triton")), truth, [plain])


def test_strong_decays_take_no_digits_from_weak_ones() -> None:
    given = draw(Sizes(H=1, N=64), "gated", F32)
    decay = given["log_decay"]
    assert decay is not None
    decay[...] = torch.where(torch.arange(64, device=decay.device) % 7 == 3, -70.0, -0.01)
    truth = answers(double(given), by_tokens)
    plain = errors(answers(given, by_tokens), truth)
    assert_as_exact(answers(given, called("triton")), truth, [plain])


@pytest.mark.parametrize("rule", ["gated", "delta"])
def test_documents_and_padding(rule: str) -> None:
    """As in PyTorch's operations; what padding hides may be NaN, and gets no gradient."""
    given = draw(Sizes(B=2, H=1, N=75), rule, F32)
    ids = torch.tensor([[0] * 3 + [1] * 62 + [2] * 10, [7] * 64 + [8] * 11], device=cases.DEVICE)
    mask = masks.documents(ids) & masks.padding([75, 70])
    right = answers(given, called("tiled", mask))
    for name in ("k", "v", "log_decay", "beta"):
        if given[name] is not None:
            given[name][1, :, 70:] = torch.nan  # type: ignore[index]
    found = answers(given, called("triton", mask))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_state_goes_on_in_its_document() -> None:
    ids = torch.tensor([0] * 20 + [1] * 20, device=cases.DEVICE)
    given = draw(Sizes(N=40), "gated delta", F32)
    q, k, v, decay, beta = (given[name] for name in NAMES[:5])
    for cut in (20, 25):
        outs = []
        for backend in ("triton", "tiled"):
            state = linear.State()
            for part in (slice(0, cut), slice(cut, 40)):
                here = [t[:, :, part] for t in (q, k, v, beta, decay)]  # type: ignore[index]
                mask = masks.documents(ids[part])
                outs.append(linear.delta(*here, mask=mask, state=state, backend=backend))
            assert state.tokens == 40
        torch.testing.assert_close(outs[:2], outs[2:], rtol=1e-4, atol=1e-5)


def test_memory_is_read_by_its_strides() -> None:
    given = draw(Sizes(), "gated delta", F32)
    right = answers(given, called("triton"))
    for name in ("q", "k", "v", "g"):
        t = given[name]
        assert t is not None
        given[name] = t.transpose(1, 2).contiguous().transpose(1, 2)
    v, beta = given["v"], given["beta"]
    given["v"] = torch.stack([v, v], -1)[..., 0]  # type: ignore[list-item]
    given["beta"] = torch.stack([beta, beta], -1)[..., 0]  # type: ignore[list-item]
    found = answers(given, called("triton"))
    assert all(torch.equal(found[name], t) for name, t in right.items())


def test_nan_stays_behind_what_came_before() -> None:
    """Of keys of gated attention; what the delta rule writes spoils its chunk of 64."""
    given = draw(Sizes(H=1), "gated", F32)
    run = called("triton")
    right, _ = run(*(given[name] for name in NAMES))
    given["k"][:, :, 50, 0] = torch.nan  # type: ignore[index]
    found, _ = run(*(given[name] for name in NAMES))
    assert torch.equal(found[:, :, :50], right[:, :, :50])
    assert found[:, :, 50:].isnan().all()


def test_second_and_batched_gradients_are_those_of_plain_operations() -> None:
    given = draw(Sizes(N=20), "gated delta", F32)
    # Where nothing is left, second derivatives of PyTorch's operations are NaN.
    given["log_decay"] = given["log_decay"].clamp_min(-3)  # type: ignore[union-attr]
    found = []
    for backend in ("triton", "tiled"):
        q, k, v, decay, beta = (given[name].detach().requires_grad_() for name in NAMES[:5])  # type: ignore[union-attr]
        out = linear.delta(q, k, v, beta, decay, backend=backend)
        pulls = torch.stack([given["g"], given["g"] ** 2])  # type: ignore[operator, list-item]
        many = torch.autograd.grad(out, decay, pulls, retain_graph=True, is_grads_batched=True)[0]
        (first,) = torch.autograd.grad(out.square().sum(), beta, create_graph=True)
        found.append((many, *torch.autograd.grad(first.square().sum(), (q, k, decay))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_trace_has_the_kernels_output() -> None:
    given = draw(Sizes(N=30), "gated delta", F32)
    inputs = [given[name] for name in ("q", "k", "v", "beta", "log_decay")]
    trace = linear.delta_trace(*inputs, backend="triton")  # type: ignore[arg-type]
    assert torch.equal(trace.out, linear.delta(*inputs, backend="triton"))  # type: ignore[arg-type]


def test_what_cannot_run_is_refused() -> None:
    given = draw(Sizes(N=4), "gated delta", F32)
    q, k, v, decay, beta = (given[name] for name in NAMES[:5])
    with pytest.raises(RegardError, match="fade all channels of a head alike"):
        linear.gated(q, k, v, decay[..., None].expand_as(k), backend="triton")  # type: ignore[index, arg-type]
    wide = [t.double() for t in (q, k, v, beta)]  # type: ignore[union-attr]
    with pytest.raises(RegardError, match="compute in float32"):
        linear.delta(*wide, backend="triton")
    broad = torch.ones(1, 1, 4, 300, device=cases.DEVICE)
    with pytest.raises(RegardError, match="up to 256 wide"):
        linear.delta(broad, broad, broad, beta, backend="triton")  # type: ignore[arg-type]
    with pytest.raises(RegardError, match="'triton', 'tiled' or None"):
        linear.delta(q, k, v, beta, backend="flex")  # type: ignore[arg-type]
    nothing = [t[:, :, :0] for t in (q, k, v, beta)]  # type: ignore[index]
    assert linear.delta(*nothing).shape == (1, 2, 0, 5)
    with pytest.raises(RegardError, match="no kernel for empty tensors"):
        linear.delta(*nothing, backend="triton")
