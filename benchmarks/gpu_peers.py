"""What is measured on a GPU, with what clock: PyTorch's own attention and regard's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from regard import masks
from regard.backends.triton import Triton
from regard.inputs import AttentionInputs, check

CASE_MS, FEWEST, MOST = 900, 8, 200
"""How long a case is measured, in how many turns of all peers at least and at most."""
CACHE = 256 << 20
"""Bytes that are overwritten before each call: more than a card's cache holds."""

Run = Callable[[], Any]
PEERS = ("cuDNN", "FlashAttention-2", "FlexAttention")


@dataclass
class Setup:
    """How cases are run: measured; once each, to compile; or once and tiny, to try the script."""

    once: bool = False
    tiny: bool = False
    device: str = "cuda"
    left_out: list[str] = field(default_factory=list)
    """Peers that did not take a case, and why."""

    def __post_init__(self) -> None:
        self.source = torch.Generator(self.device).manual_seed(0)

    def length(self, n: int) -> int:
        return max(16, n // 128) if self.tiny else n

    def heads(self, n: int) -> int:
        return max(1, n // 8) if self.tiny else n

    def tensors(self, *shape: int, count: int = 3, grad: bool = False) -> list[Tensor]:
        how: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        how |= {"generator": self.source, "requires_grad": grad}
        return [torch.randn(*shape, **how) for _ in range(count)]

    def medians(self, case: str, runs: Mapping[str, Run]) -> dict[str, float]:
        """Median milliseconds of each run, taken in turns, without peers that refuse the case."""
        able = {}
        for name, run in runs.items():
            try:
                assert_finite(f"{name}, {case}", run())
            # Whatever keeps a peer from running is said in the results; ours must run.
            except Exception as error:
                if name not in PEERS:
                    raise
                reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
                self.left_out.append(f"{name}, {case}: {reason}")
            else:
                able[name] = run
        if self.once:
            return {name: self.milliseconds(run) for name, run in able.items()}
        return in_turns(able)

    def milliseconds(self, run: Run, repeats: int = 3) -> float:
        """The median of a few runs, for those that take long."""
        taken = []
        for _ in range(1 if self.once else repeats):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            taken.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken)

    def peak(self, run: Run) -> int:
        """Bytes held at most while running, beside what is held already."""
        if self.device != "cuda":
            run()
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def in_turns(runs: Mapping[str, Run]) -> dict[str, float]:
    """Median milliseconds of single calls with a cold cache, one of each run in every turn: a card
    that grows hot and slow in between does so for all of them."""
    cache = torch.empty(CACHE, dtype=torch.int8, device="cuda")

    def turn() -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        marks = {}
        for name, run in runs.items():
            cache.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            marks[name] = before, after
        return marks

    turn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    took = (time.perf_counter() - start) * 1e3
    turns = [turn() for _ in range(min(MOST, max(FEWEST, int(CASE_MS / took))))]
    torch.cuda.synchronize()
    return {
        name: statistics.median(
            before.elapsed_time(after) for before, after in (marks[name] for marks in turns)
        )
        for name in runs
    }


def assert_finite(what: str, answer: Any) -> None:
    """No number is reported for a kernel that gives NaN."""
    for tensor in _tensors(answer):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise AssertionError(f"{what}: NaN or infinity in the answer")


def _tensors(answer: Any) -> Iterable[Tensor]:
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, tuple):
        for part in answer:
            yield from _tensors(part)


def checked(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> AttentionInputs:
    """A call checked beforehand, so that only kernels are measured."""
    return check(
        q, k, v, mask=mask, score=None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0,
        training=False,
    )  # fmt: skip


def ours(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> dict[str, Run]:
    from regard.backends.triton.forward import run
    from regard.backends.triton.tuning import forward_settings

    inputs, kernels = checked(q, k, v, mask), Triton()
    same = forward_settings(inputs, statistics=True)
    return {
        "trace": lambda: kernels.observe(inputs),
        "no statistics": lambda: run(inputs, same, statistics=False)[0],
    }


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> dict[str, Run]:
    """cuDNN and FlashAttention-2, as PyTorch ships them."""
    kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    grouped = q.shape[1] != k.shape[1]

    def run(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return {name: (lambda kernel=kernel: run(kernel)) for name, kernel in kernels.items()}


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None
) -> dict[str, Run]:
    """FlexAttention, compiled for the shape. On a CPU it is left out."""
    if q.device.type != "cuda":
        return {}
    mask = None
    if causal:
        rule = _causal if window is None else _window(window)
        mask = create_block_mask(rule, None, None, q.shape[2], k.shape[2], device="cuda")
    grouped = q.shape[1] != k.shape[1]
    compiled = _compiled_flex()
    return {"FlexAttention": lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)}


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


@cache
def _window(left: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda b, h, q, k: (k <= q) & (q - k <= left)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch._dynamo import config
    from torch._inductor import config as compiling

    # One kernel at a time needs no pool of compilers.
    compiling.compile_threads = 1
    # Past the limit it would run in its n×n form.
    config.recompile_limit = 128
    config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


def with_gradients(run: Run, tensors: list[Tensor], pull: Tensor) -> Run:
    """A forward and a backward pass."""

    def both() -> tuple[Tensor, ...]:
        answer = run()
        out = answer if isinstance(answer, Tensor) else answer[0]
        return torch.autograd.grad(out, tensors, pull)

    return both
