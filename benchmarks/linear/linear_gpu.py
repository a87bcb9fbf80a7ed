"""Linear and additive attention on a CUDA GPU, beside regard's and PyTorch's fused attention and
the plain forms. First whether they are right: nothing is measured otherwise.

python -m benchmarks.linear.linear --device cuda [--gates] [--quick]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.kernels import gpu_setup
from benchmarks.kernels.gpu_setup import assert_finite, in_turns
from benchmarks.linear import linear_gates
from benchmarks.measurement import write
from regard import linear, masks, scores

CAUSAL = masks.causal()
HEADS = 16
UNITS = 64
DOCUMENT = 300
TYPES = (torch.bfloat16, torch.float16, torch.float32)
Form = Callable[..., Tensor]
Row = dict[str, Any]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    source = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(shape, generator=source, device="cuda").to(dtype).requires_grad_()
        for shape in shapes
    ]


def by_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention with all pairs at once."""
    weights = (linear.elu_plus_one(q) @ linear.elu_plus_one(k).mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def document_ids(q: Tensor) -> Tensor:
    """Of which text each token is."""
    return torch.arange(q.shape[2], device=q.device) // DOCUMENT


def documents_by_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same where texts are packed."""
    ids = document_ids(q)
    weights = linear.elu_plus_one(q) @ linear.elu_plus_one(k).mT
    weights = torch.where(ids[:, None] == ids, weights, 0.0).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def additive_by_pairs(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Additive attention with all pairs and units at once."""
    logits = torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ w
    return logits.float().softmax(-1).to(v.dtype) @ v


def ours_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear.attention(q, k, v, mask=CAUSAL, backend="triton")


def packed(backend: str) -> Form:
    """Linear attention of packed texts."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = CAUSAL & masks.documents(document_ids(q))
        return linear.attention(q, k, v, mask=mask, backend=backend)

    return run


def ours_additive(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    one = torch.eye(q.shape[-1], device=q.device, dtype=q.dtype)
    return regard.attention(q, k, v, score=scores.additive(one, one, w), backend="triton")


def answers(form: Form, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and gradients of its squares' sum."""
    out = form(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def errors(form: Form, right: Form, inputs: list[Tensor]) -> list[tuple[float, float]]:
    """For output and gradients: our error against float64, and that of the plain form in the
    inputs' own precision."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = answers(right, wide)
    found = [answers(f, inputs) for f in (form, right)]
    return [
        tuple(float((t.double() - exact).norm() / exact.norm()) for t in (ours, plain))  # type: ignore[misc]
        for ours, plain, exact in zip(*found, truth, strict=True)
    ]


def checks(*, quick: bool) -> list[Row]:
    """Ours may err four times as much as the plain form, and one rounding. Most of the time is
    taken by compiling: quickly, less of it is asked for."""
    rows = []
    forms = {"linear": (ours_linear, by_pairs), "documents": (packed("triton"), documents_by_pairs)}
    for dtype in (torch.bfloat16, torch.float32) if quick else TYPES:
        for width in (64,) if quick else (64, 128):
            inputs = drawn(*[(1, 2, 1000, width)] * 3, dtype=dtype)
            for name, form in forms.items():
                for (ours, plain), what in zip(
                    errors(*form, inputs), ("out", "dq", "dk", "dv"), strict=True
                ):
                    rows.append(_checked(name, dtype, width, what, ours, plain))
    for dtype in (torch.bfloat16,) if quick else TYPES:
        inputs = drawn(*[(1, 2, 300, UNITS)] * 3, (UNITS,), dtype=dtype)
        for (ours, plain), what in zip(
            errors(ours_additive, additive_by_pairs, inputs),
            ("out", "dq", "dk", "dv", "dw"),
            strict=True,
        ):
            rows.append(_checked("additive", dtype, UNITS, what, ours, plain))
    return rows + gate_checks(quick=quick)


def gate_checks(*, quick: bool) -> list[Row]:
    """The same of gates and the delta rule, and of several segments of a longer text against
    PyTorch's operations in float64."""
    rows = []
    for rule, dtype, width, names, form, right, inputs in linear_gates.checked(quick=quick):
        for (ours, plain), what in zip(errors(form, right, inputs), names, strict=True):
            rows.append(_checked(rule, dtype, width, what, ours, plain))
        if dtype == torch.bfloat16:
            call = linear_gates.drawn(rule, 2, 6000, width, dtype).tensors
            both = errors(form, linear_gates.ours(rule, "tiled"), call)
            for (ours, plain), what in zip(both, names, strict=True):
                # PyTorch's operations compute in float32, and round at the end.
                plain = max(plain, 2 * torch.finfo(dtype).eps)
                rows.append(_checked(f"{rule}, 6,000 tokens", dtype, width, what, ours, plain))
    return rows


def _checked(
    form: str, dtype: torch.dtype, width: int, what: str, ours: float, plain: float
) -> Row:
    if not ours <= 4 * plain + torch.finfo(dtype).eps:
        sys.exit(f"not measured: {form} {dtype} {width} {what} errs {ours:.3g}, plain {plain:.3g}")
    name = str(dtype).removeprefix("torch.")
    return {"form": form, "type": name, "width": width, "of": what, "ours": ours, "plain": plain}


def peers() -> dict[str, Form]:
    """Linear attention of others, where it is installed."""
    if find_spec("fla") is None:
        return {}
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (t.transpose(1, 2) for t in (linear.elu_plus_one(q), linear.elu_plus_one(k), v))
        found: Tensor = chunk_linear_attn(*turned, scale=1.0, normalize=True)[0]
        return found.transpose(1, 2)

    return {"fla": run}


def forms() -> dict[str, Form]:
    return {
        "linear": ours_linear,
        "linear, plain": lambda q, k, v: linear.attention(q, k, v, mask=CAUSAL, backend="tiled"),
        "regard.attention": lambda q, k, v: regard.attention(q, k, v, mask=CAUSAL),
        "SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        **peers(),
    }


def timed(runs: dict[str, Form], inputs: list[Tensor], *, backward: bool) -> dict[str, float]:
    """Milliseconds of each form, in turns."""

    def made(form: Form) -> Callable[[], Any]:
        if not backward:
            return lambda: form(*(t.detach() for t in inputs))
        pull = torch.ones_like(form(*inputs))
        return lambda: torch.autograd.grad(form(*inputs), inputs, pull, allow_unused=True)

    asked = {name: made(form) for name, form in runs.items()}
    for name, run in list(asked.items()):
        try:
            assert_finite(name, run())
        except RuntimeError as error:
            # A peer may refuse a call with this Triton: that is said, and the rest is measured.
            if name != "fla":
                raise
            print(f"left out: {name}: {error}", file=sys.stderr)
            del asked[name]
    return in_turns(asked)


def compared(lengths: list[int], *, backward: bool, widths: tuple[int, ...]) -> list[Row]:
    rows = []
    for width in widths:
        for n in lengths:
            inputs = drawn(*[(1, HEADS, n, width)] * 3, dtype=torch.bfloat16)
            found = timed(forms(), inputs, backward=backward)
            first = found["linear"]
            row: Row = {"width": width, "n": n, "linear ms": first}
            row |= {f"{name} ÷ linear": t / first for name, t in found.items() if name != "linear"}
            rows.append(row)
    return rows


def compared_documents(lengths: list[int], *, backward: bool) -> list[Row]:
    """Packed texts: ours, PyTorch's operations, one text as long as all, and fused attention."""
    rows = []
    for n in lengths:
        inputs = drawn(*[(1, HEADS, n, 64)] * 3, dtype=torch.bfloat16)
        fused = CAUSAL & masks.documents(document_ids(inputs[0]))

        def attended(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask = fused) -> Tensor:
            return regard.attention(q, k, v, mask=mask)

        runs = {
            "documents": packed("triton"), "plain": packed("tiled"), "one text": ours_linear,
            "regard.attention": attended,
        }  # fmt: skip
        found = timed(runs, inputs, backward=backward)
        first = found.pop("documents")
        ratios = {f"{name} ÷ documents": t / first for name, t in found.items()}
        rows.append({"n": n, "documents ms": first} | ratios)
    return rows


def compared_gates(
    rule: str, lengths: list[int], *, backward: bool, widths: tuple[int, ...]
) -> list[Row]:
    rows = []
    for width in widths:
        for n in lengths:
            inputs = linear_gates.drawn(rule, HEADS, n, width, torch.bfloat16).tensors
            found = timed(linear_gates.forms(rule), inputs, backward=backward)
            first = found.pop("ours")
            ratios = {f"{name} ÷ ours": t / first for name, t in found.items()}
            rows.append({"width": width, "n": n, "ours ms": first} | ratios)
    return rows


def compared_additive(lengths: list[int], *, backward: bool) -> list[Row]:
    rows = []
    for n in lengths:
        inputs = drawn(*[(1, 2, n, UNITS)] * 3, (UNITS,), dtype=torch.bfloat16)
        one = torch.eye(UNITS, device="cuda", dtype=torch.bfloat16)

        def tiled(q: Tensor, k: Tensor, v: Tensor, w: Tensor, one: Tensor = one) -> Tensor:
            return regard.attention(q, k, v, score=scores.additive(one, one, w), backend="tiled")

        runs = {"triton": ours_additive, "tiled": tiled, "n×n": additive_by_pairs}
        found = timed(runs, inputs, backward=backward)
        row: Row = {"n": n, "triton ms": found["triton"]}
        row |= {f"{name} ÷ triton": found[name] / found["triton"] for name in ("tiled", "n×n")}
        rows.append(row)
    return rows


def summary(tables: dict[str, list[Row]]) -> list[Row]:
    """Of every ratio its mean and its worst, which is the least."""
    rows = []
    for title, table in tables.items():
        for name in table[0]:
            if "÷" in name:
                all_of_it = [row[name] for row in table if name in row]
                mean, worst = statistics.mean(all_of_it), min(all_of_it)
                rows.append({"table": title, "ratio": name, "mean": mean, "worst": worst})
    return rows


def main_gates(*, quick: bool, folder: Path) -> None:
    """Gates and the delta rule alone."""
    gpu_setup.CASE_MS = 100 if quick else 400
    tables = {"Errors against float64, forward and backward": gate_checks(quick=quick)}
    lengths = [8192] if quick else [1024, 4096, 16384]
    widths = (128,) if quick else (64, 128)
    measured: dict[str, list[Row]] = {}
    for backward, what in ((False, "forward"), (True, "forward and backward")):
        for rule in linear_gates.RULES:
            title = f"{rule.capitalize()}, {HEADS} heads, bfloat16, {what}"
            measured[title] = compared_gates(rule, lengths, backward=backward, widths=widths)
            # Peers choose their settings for minutes: what is known is written down meanwhile.
            told = {"How many times as long others take": summary(measured)}
            write("linear_gates_gpu", tables | measured | told, about_card(), folder)


def about_card() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "peers": "fla" if peers() else "flash-linear-attention is not installed here",
    }


def main(*, quick: bool) -> None:
    gpu_setup.CASE_MS = 100 if quick else 400
    tables = {"Errors against float64, forward and backward": checks(quick=quick)}
    lengths = [1024, 16384] if quick else [1024, 4096, 16384, 65536]
    measured = {}
    for backward, what in ((False, "forward"), (True, "forward and backward")):
        title = f"Causal, {HEADS} heads, bfloat16, {what}"
        widths = (64,) if quick else (64, 128)
        measured[title] = compared(lengths, backward=backward, widths=widths)
        title = f"Documents of {DOCUMENT} tokens, causal, {HEADS} heads 64 wide, bfloat16, {what}"
        measured[title] = compared_documents(lengths, backward=backward)
        title = f"Additive, 2 heads, {UNITS} units, bfloat16, {what}"
        measured[title] = compared_additive(
            [256, 1024, 4096][: 2 if quick else 3], backward=backward
        )
    tables |= measured
    tables["How many times as long others take"] = summary(measured)
    write("linear_gpu", tables, about_card())
