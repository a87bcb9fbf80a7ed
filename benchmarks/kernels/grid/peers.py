"""The runs of a call: regard's two, and every peer that can do it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import regard
from benchmarks.kernels.grid.cases import DTYPES, Case
from benchmarks.kernels.grid.clock import Run
from benchmarks.kernels.grid.kinds import Kind, Rule, kind_of

KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = (*KERNELS, "Flex")
OURS = ("attention", "trace")
TILE = 128


@dataclass(frozen=True)
class Call:
    """A case with its tensors."""

    case: Case
    kind: Kind
    q: Tensor
    k: Tensor
    v: Tensor
    pull: Tensor
    """The gradient of the output."""

    @staticmethod
    def make(case: Case, device: str) -> Call:
        source = torch.Generator(device).manual_seed(0)
        dtype = DTYPES[case.dtype]

        def some(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=source)

        B, H, G, Q, n = case.B, case.H, case.G, case.Q, case.n
        q, k, v = some(B, H, Q, case.width), some(B, G, n, case.width), some(B, G, n, case.E)
        kind = kind_of(case.kind, B, H, n, device, dtype, grad=case.backward)
        q *= kind.sharpness
        for leaf in (q, k, v):
            leaf.requires_grad_(case.backward)
        return Call(case, kind, q, k, v, some(B, H, Q, case.E))

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What gradients are asked for, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        return found if self.kind.sink is None else found | {"sink": self.kind.sink}

    @property
    def pairs(self) -> int:
        """Allowed ones, over all texts and heads."""
        case, mask = self.case, self.kind.mask
        if mask is None:
            return case.B * case.H * case.Q * case.n
        apart = case.B if mask.batch == 1 else 1
        return mask.count(case.Q, case.n) * apart * case.H

    def ours(self) -> list[Run]:
        q, k, v, words = self.q, self.k, self.v, self.kind.regard
        return [
            self._run("attention", lambda: regard.attention(q, k, v, **words)),
            self._run("trace", lambda: regard.trace(q, k, v, **words)),
        ]

    def peers(self, left_out: list[str]) -> list[Run]:
        """Those that can do the call; why others cannot goes to `left_out`. FlexAttention, which
        takes seconds to compile, is asked where PyTorch's fastest kernels cannot, or only with a
        mask that is written out."""
        able = [run for run in self._sdpa() if self._takes(run, left_out)]
        fast = {run.name for run in able} & {"cuDNN", "FlashAttention-2", "SDPA"}
        if (self.kind.dropout or (fast and self.kind.batch == 1)) and not self._packs():
            return able
        return able + [run for run in self._flex() if self._takes(run, left_out)]

    def _packs(self) -> bool:
        """Whether many heads ask one key head for one query each: FlexAttention packs them."""
        return self.case.decode and self.case.H // self.case.G > 32

    def _takes(self, run: Run, left_out: list[str]) -> bool:
        try:
            with warnings.catch_warnings():
                # PyTorch warns of each reason why a kernel does not take a call.
                warnings.simplefilter("ignore")
                run()
            if self.q.is_cuda:
                torch.cuda.synchronize()
        # Whatever keeps a peer from running is said in the results.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
            left_out.append(f"{run.name}, {self.case}: {reason}")
            return False
        return True

    def _sdpa(self) -> Iterator[Run]:
        words = self.kind.sdpa
        if words is None:
            return
        q, k, v, group = self.q, self.k, self.v, self.case.H // self.case.G
        grouped = group > 1

        def plain() -> Tensor:
            return scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **words)

        def repeated() -> Tensor:
            many_k, many_v = (t.repeat_interleave(group, 1) for t in (k, v))
            return scaled_dot_product_attention(q, many_k, many_v, **words)

        if not q.is_cuda:
            yield self._run("SDPA", plain)
            return
        for name, kernel in KERNELS.items():
            # It knows no grouped heads: who uses it repeats keys and values.
            by = repeated if grouped and name == "efficient" else plain
            yield self._run(name, by, kernel)

    def _flex(self) -> Iterator[Run]:
        q, k, v, kind = self.q, self.k, self.v, self.kind
        mask = None
        if kind.rule is not None:
            mask = block_mask(kind.rule, kind.batch, self.case.Q, self.case.n, str(q.device))
        run = compiled(_with_sink if kind.sink is not None else flex_attention, q.device.type)
        words: dict[str, Any] = {"score_mod": kind.change, "block_mask": mask}
        words["enable_gqa"] = self.case.H != self.case.G
        if kind.sink is not None:
            words["sink"] = kind.sink
        yield self._run("Flex", lambda: run(q, k, v, **words))

    def _run(self, name: str, forward: Callable[[], Any], kernel: SDPBackend | None = None) -> Run:
        back = (lambda answer: self.gradients(answer, self.pull)) if self.case.backward else None
        return Run(name, forward, kernel, back)

    def gradients(self, answer: Tensor | regard.Trace, pull: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output(answer), list(self.leaves.values()), pull)


def output(answer: Tensor | regard.Trace) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer.out


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **words: Any) -> Tensor:
    """A sink takes its share of each row after the fact."""
    out, lse = flex_attention(q, k, v, return_lse=True, **words)
    share = torch.sigmoid(lse - sink.float()[:, None])
    return (out * share[..., None]).to(out.dtype)


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compiled anew for this case, as if nothing had been compiled before."""
    # A CPU runs trials only.
    if device != "cuda":
        return function
    from torch._dynamo import config
    from torch._inductor import config as compiling

    # One kernel at a time needs no pool of compilers.
    compiling.compile_threads = 1
    # Past the limit it would run in its n×n form.
    config.recompile_limit = 1024
    config.fail_on_recompile_limit_hit = True
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def block_mask(rule: Rule, batch: int, queries: int, keys: int, device: str) -> BlockMask:
    """What create_block_mask makes of a rule, without asking for all n×n pairs at a time."""
    tiles = -(-queries // TILE), -(-keys // TILE)
    partial, full = (torch.zeros(batch, 1, *tiles, dtype=torch.bool, device=device) for _ in "pf")
    head, k = torch.zeros((), dtype=torch.long, device=device), torch.arange(keys, device=device)
    for b in range(batch):
        for start in range(0, queries, 8 * TILE):
            q = torch.arange(start, min(start + 8 * TILE, queries), device=device)
            seen = rule(head + b, head, q[:, None], k).expand(len(q), keys)
            seen = pad(seen, (0, -keys % TILE, 0, -len(q) % TILE))
            many = seen.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).sum((1, 3))
            rows = slice(start // TILE, start // TILE + len(many))
            full[b, 0, rows] = many == TILE * TILE
            partial[b, 0, rows] = (many > 0) & (many < TILE * TILE)
    lists = (*_listed(partial), *_listed(full))
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(queries, keys)
    )


def _listed(wanted: Tensor) -> tuple[Tensor, Tensor]:
    order = wanted.int().argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1, dtype=torch.int32), order.int()
