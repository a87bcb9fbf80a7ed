"""A Trace: q, k and one number per row, from which every weight can be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.contract import LogitSpread, Pool, Rows, SecondPass, Top
from regard.backends.questions.block_mass import Blocks, Recall, indexer_target, recall
from regard.backends.questions.differentiable import Question, answer
from regard.biases.bias import Bias
from regard.display import Displayed
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.scores.comparison import Dot
from regard.scores.score import Score
from regard.traces import trace_questions
from regard.traces.places import Chosen, Region, entries, places, pooled_region, region_of
from regard.transforms import transformed
from regard.values import whole

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Displayed):
    """What one attention call did.

    Answers have the axes of the inputs: [B, H, ...] for inputs [B, H, N, D], without H for
    [B, N, D], without both for [N, D], with all axes before H where there are more. Weights are per
    head and before dropout.

    >>> import regard, torch
    >>> q = k = v = torch.ones(1, 2, 5, 4)
    >>> t = regard.trace(q, k, v, mask=regard.masks.causal())
    >>> t
    Trace(batch 1, heads 2, queries 5, keys 5, width 4, float32 on cpu, mask=causal(), by tiled)
    >>> t.weights(queries=[0], heads=[1])
    tensor([[[[1., 0., 0., 0., 0.]]]])
    """

    inputs: AttentionInputs
    rows: Rows
    backend: str
    second_pass: SecondPass
    mask: Mask | None = None
    """The mask as it was given, without lengths."""

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "*bh q d"],
        k: Float[Tensor, "*bg k d2"],
        lse: Float[Tensor, "*bh q"],
        *,
        v: Float[Tensor, "*bg k e"] | None = None,
        out: Float[Tensor, "*bh q e"] | None = None,
        mask: Mask | None = None,
        score: Score | None = None,
        bias: Bias | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, "h"] | None = None,
        scale: float | None = None,
        backend: str | None = None,
        cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
        verify: bool = True,
    ) -> Trace:
        """A trace of a call that was computed elsewhere: by another kernel, library or rank.
        Attention is not run again.

        `lse` is the natural logarithm of each row's sum, as FlashAttention, FlexAttention and
        `varlen_attn` return it; the other arguments are those of the call. A few rows of each head
        are computed to check that `lse` belongs to them, unless `verify=False`.

        Weights, `received`, `top`, `map` and `mass` need no more. `max_logit` and `entropy`, and
        the output if `v` was given and `out` was not, are computed when they are first read.

        Gradients flow if `lse` is part of the graph; from one that is not, the trace is detached.

        >>> import regard, torch
        >>> q, k = torch.randn(2, 1, 2, 16, 8)
        >>> lse = (q @ k.mT / 8**0.5).logsumexp(-1)                   # as a kernel returns it
        >>> regard.Trace.of(q, k, lse).received().shape
        torch.Size([1, 2, 16])
        """
        from regard.calls.given_traces import given_trace

        return given_trace(
            q, k, lse, v=v, out=out, mask=mask, score=score, bias=bias, softcap=softcap, sink=sink,
            scale=scale, backend=backend, cu_seqlens=cu_seqlens, verify=verify,
        )  # fmt: skip

    @classmethod
    def of_weights(cls, weights: Float[Tensor, "*bh q k"]) -> Trace:
        """A trace made from weights alone, such as another library's: rows that sum to 1.
        Pairs of weight 0 count as masked. There are no values, and no gradients.

        >>> import regard, torch
        >>> regard.Trace.of_weights(torch.tensor([[1.0, 0.0], [0.25, 0.75]])).top(1).indices
        tensor([[0],
                [1]])
        """
        from regard.calls.given_traces import trace_of_weights

        return trace_of_weights(weights)

    @property
    def out(self) -> Float[Tensor, "*bh q e"]:
        """The output, the tensor that `attention` gives. Differentiable."""
        return self.inputs.in_kind(self.rows.out)

    @property
    def lse(self) -> Float[Tensor, "*bh q"]:
        """log Σ exp(logit) of each row, the sink included; -inf for a row that sees nothing.
        Differentiable."""
        return self.inputs.in_kind(self.rows.lse)

    @property
    def max_logit(self) -> Float[Tensor, "*bh q"]:
        """The largest logit of each row: after scale, soft-cap and bias, of allowed keys only.
        Differentiable: keys that share the largest share the gradient."""
        (largest,) = self._answer(trace_questions.max_logit(), self.rows.max_logit)
        return self.inputs.in_kind(largest)

    @property
    def entropy(self) -> Float[Tensor, "*bh q"]:
        """-Σ p log p of each row in nats, the sink being one more place; 0 for an empty row.
        Differentiable."""
        return self.inputs.in_kind(self.rows.entropy)

    @property
    def mean_logit(self) -> Float[Tensor, "*bh q"]:
        """The plain mean of each row's allowed logits; -inf for an empty row. Goes over all pairs.
        Differentiable."""
        (mean,) = self._answer(trace_questions.mean_logit(self.second_pass))
        return self.inputs.in_kind(mean)

    @property
    def std_logit(self) -> Float[Tensor, "*bh q"]:
        """The standard deviation of each row's allowed logits around their mean (of all of them:
        divided by n, not n - 1); 0 for an empty row. Goes over all pairs. No gradient.

        >>> import regard, torch
        >>> _ = torch.manual_seed(0)
        >>> q, k = torch.randn(2, 1000, 64)
        >>> scaled = regard.trace(q, k, k)                     # by 1/√64: about 1
        >>> bare = regard.trace(q, k, k, scale=1.0)            # about √64
        >>> scaled.std_logit.mean().round(), bare.std_logit.mean().round()
        (tensor(1.), tensor(8.))
        """
        return self.inputs.in_kind(self._spread("std_logit").variance.sqrt())

    @property
    def min_logit(self) -> Float[Tensor, "*bh q"]:
        """The least logit of each row: after scale, soft-cap and bias, of allowed keys only; inf
        for an empty row. Goes over all pairs. No gradient."""
        return self.inputs.in_kind(self._spread("min_logit").lowest)

    def _spread(self, name: str) -> LogitSpread:
        return LogitSpread(*self._answer(trace_questions.logit_spread(self.second_pass, name)))

    def received(self) -> Float[Tensor, "*bh k"]:
        """What each key got from all queries: the column sums of the weights. Differentiable."""
        (found,) = self._answer(trace_questions.received(self.second_pass))
        return self.inputs.in_kind(found)

    def top(self, n: int) -> Top:
        """Weights and key indices of each query's n strongest keys, strongest first.

        A query that sees fewer keys has weight 0 and index -1 for the rest. With n above the number
        of keys K there are K of them: the last axis is min(n, K) long.

        >>> import regard, torch
        >>> x = torch.randn(5, 4)
        >>> regard.trace(x, x, x, mask=regard.masks.causal()).top(9).indices[0]
        tensor([ 0, -1, -1, -1, -1])
        """
        if whole("top: n", n) < 1:
            raise RegardError("top counts keys", got=str(n), accepted="1 or more")
        found = self._answer(trace_questions.top(self.second_pass, n))
        return Top(*(self.inputs.in_kind(part) for part in found))

    def weights(
        self, queries: Chosen = None, keys: Chosen = None, heads: Chosen = None
    ) -> Float[Tensor, "*bh q k"]:
        """The exact weights of chosen queries, keys and heads; of all of them if none are named.

        Differentiable. Only what was asked for is computed."""
        part, q, k = self._chosen(queries, keys, heads)
        return part.inputs.in_kind(part.second_pass.weights(part.inputs, part.rows.lse, q, k))

    def logits(
        self, queries: Chosen = None, keys: Chosen = None, heads: Chosen = None
    ) -> Float[Tensor, "*bh q k"]:
        """The scores before softmax, of chosen queries, keys and heads: after scale, soft-cap and
        bias, exact also where a weight is too small for its number; -inf where a pair is masked.

        Differentiable. Only what was asked for is computed.

        >>> import regard, torch
        >>> q, k = torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.5]])
        >>> t = regard.trace(q, k, k)
        >>> t.weights(), t.logits()
        (tensor([[1., 0.]]), tensor([[1000.,  500.]]))
        """
        part, q, k = self._chosen(queries, keys, heads)
        return part.inputs.in_kind(part.second_pass.logits(part.inputs, q, k))

    def _chosen(
        self, queries: Chosen, keys: Chosen, heads: Chosen
    ) -> tuple[Trace, Int[Tensor, "q"], Int[Tensor, "k"]]:
        """The trace of chosen heads, and the places of chosen queries and keys."""
        if heads is not None and self.inputs.rank < 4:
            raise RegardError(
                "heads= needs inputs that have heads",
                got=f"{self.inputs.rank}-D inputs",
                accepted="inputs [B, H, N, D]",
            )
        every = (slice(None),) * max(len(self.inputs.lead), 1)
        part = self if heads is None else self[(*every, heads)]
        x = part.inputs
        q = places(queries, x.shape.Q, "queries", x.q.device)
        return part, q, places(keys, x.shape.K, "keys", x.q.device)

    def mass(self, keys: Chosen) -> Float[Tensor, "*bh q"]:
        """The share of each row that falls on given keys; `mass(0)` is the first-token sink. Keys
        are a set: one that is named twice counts once. Differentiable."""
        x = self.inputs
        chosen = places(keys, x.shape.K, "keys", x.q.device, once=True)
        return x.in_kind(self.second_pass.mass(x, self.rows.lse, chosen))

    def map(
        self,
        cells: int | tuple[int, int],
        queries: Region = None,
        keys: Region = None,
        pool: Pool = "mean",
    ) -> Float[Tensor, "*bh rows columns"]:
        """The weights of a region, pooled into cells; each head apart.

        The region is (start, stop) of queries and of keys, or a slice or range without steps; the
        whole by default. Place i of a region's n (from 0, at its start) is in cell ⌊i · cells / n⌋,
        so cells differ by one place at most. A region with fewer places than cells gives one cell
        per place. The mean counts masked pairs as 0. Differentiable; of a maximum, pairs that
        share it share the gradient.

        >>> import regard, torch
        >>> x = torch.randn(7, 4)
        >>> t = regard.trace(x, x, x)
        >>> torch.allclose(t.map(3, pool="sum")[0, 1], t.weights()[0:3, 3:5].sum())
        True
        """
        B, H, _, _ = self.inputs.shape
        size, rows, columns = pooled_region(self.inputs.shape, cells, queries, keys, pool)
        if 0 in size:
            return self.inputs.in_kind(self.rows.lse.new_zeros(B, H, *size))
        question = trace_questions.pooled(self.second_pass, size, rows, columns, pool)
        (pooled,) = self._answer(question)
        return self.inputs.in_kind(pooled)

    def recall(self, blocks: Blocks, size: int | tuple[int, int] = 64) -> Recall:
        """How much of each row a choice of key blocks keeps, and the mean over rows.

        `blocks` says for each block of queries which blocks of keys it looks at: booleans [..,
        query blocks, key blocks], or indices [.., query blocks, many] with -1 for none; for each
        head, each key head, or all. A block has `size` places, or (queries, keys). Exact, without
        n×n; differentiable.

        >>> import regard, torch
        >>> q, k = torch.randn(2, 1, 2, 100, 8)
        >>> t = regard.trace(q, k, k, mask=regard.masks.causal())
        >>> near = torch.eye(4, dtype=torch.bool)                       # each block its own keys
        >>> found = t.recall(near, 32)
        >>> found.rows.shape, found.mean.shape, round(float(found.rows[0, 0, 10]), 4)
        (torch.Size([1, 2, 100]), torch.Size([1, 2]), 1.0)
        """
        return recall(self.inputs, self.rows.lse, blocks, size)

    def indexer_target(
        self, size: int = 64, queries: Region = None
    ) -> Float[Tensor, "*b q key_blocks"]:
        """What an indexer that chooses keys for all heads should find: the weights summed over
        heads and over each block of `size` keys, normalised to sum to 1 for each query.

        A query that sees nothing has zeros. `queries` is (start, stop) for some of them. Exact,
        without n×n for each head; differentiable.

        >>> import regard, torch
        >>> q, k = torch.randn(2, 1, 4, 100, 8)
        >>> target = regard.trace(q, k, k).indexer_target(32)
        >>> target.shape, torch.allclose(target.sum(-1), torch.ones(1, 100))
        (torch.Size([1, 100, 4]), True)
        """
        region = region_of(queries, self.inputs.shape.Q, "queries", "indexer_target")
        return indexer_target(self.inputs, self.rows.lse, size, region)

    def __getitem__(self, which: Chosen | tuple[Chosen, ...]) -> Trace:
        """A trace of some batch entries, or of some batch entries and heads; all axes stay.

        >>> import regard, torch
        >>> x = torch.randn(3, 4, 5, 8)
        >>> regard.trace(x, x, x)[0, 1:3].lse.shape
        torch.Size([1, 2, 5])

        Inputs with more axes have an index for each.

        >>> x = torch.randn(2, 3, 4, 5, 8)
        >>> regard.trace(x, x, x)[0, :, 1:3].lse.shape
        torch.Size([1, 3, 2, 5])
        """
        H, device = self.inputs.shape.H, self.inputs.q.device
        lead = self.inputs.lead or (self.inputs.shape.B,)
        batch, heads = entries(which, lead, H, device)
        b, h = batch.flatten(), places(heads, H, "heads", device)
        group = self.inputs.group
        everything = heads is None or (
            len(h) == H and bool((h == torch.arange(H, device=device)).all())
        )
        # Some heads of a group no longer share a key head evenly: each takes its own along.
        g = torch.arange(self.inputs.k.shape[1], device=device) if everything else h // group
        axes = tuple(batch.shape) if self.inputs.lead else ()
        inputs = replace(self.inputs.select(b, h, g), lead=axes)
        return replace(self, inputs=inputs, rows=self.rows.map(lambda t: t[b][:, h]))

    def __len__(self) -> int:
        """How many batch entries there are; with more axes than four, along the first."""
        return (self.inputs.lead or (self.inputs.shape.B,))[0]

    def __iter__(self) -> Iterator[Trace]:
        """A trace of each of them, as `trace[b]` gives it; all axes stay.

        >>> import regard, torch
        >>> x = torch.randn(3, 4, 5, 8)
        >>> [t.lse.shape for t in regard.trace(x, x, x)][2]
        torch.Size([1, 4, 5])
        """
        return (self[b] for b in range(len(self)))

    def __bool__(self) -> bool:
        # A trace of no batch entries is a trace.
        return True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this trace to a file, which `regard.load` opens; `.trace` of that is the trace.

        >>> import regard, tempfile, torch
        >>> x = torch.randn(1, 2, 5, 4)
        >>> t = regard.trace(x, x, x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     t.save(f"{folder}/one.regard")
        ...     with regard.load(f"{folder}/one.regard") as file:
        ...         torch.equal(file.trace.weights(), t.weights())
        True
        """
        from regard.trace_files import save_trace

        save_trace(self, path)

    def to(self, device: torch.device | str) -> Trace:
        """The same trace on another device."""
        return self._mapped(lambda t: t.to(device))

    def detach(self) -> Trace:
        """The same trace, cut from autograd."""
        x = self.inputs
        inside = (x.q, x.k, x.v, *x.others, *self.rows.at_hand())
        tied = any(t.requires_grad for t in inside) or transformed(inside)
        return self._mapped(Tensor.detach) if tied else self

    def _answer(self, question: Question, row: Tensor | None = None) -> tuple[Tensor, ...]:
        return answer(question, self.inputs, self.rows.lse if row is None else row)

    def _mapped(self, change: Change) -> Trace:
        inputs = self.inputs.map_tensors(change)
        return replace(self, inputs=inputs, rows=self.rows.map(change))

    def __repr__(self) -> str:
        x, how = self.inputs, self.inputs.comparison
        (B, H, Q, K), G, width = x.shape, x.k.shape[1], x.q.shape[-1]
        heads = f"heads {H}" if G == H else f"heads {H} over {G}"
        dtype = str(x.q.dtype).removeprefix("torch.")
        said = {
            f"mask={self.mask!r}": self.mask is not None,
            f"bias={x.bias._called() if x.bias else None}": x.bias is not None,
            f"softcap={x.softcap or 0:g}": x.softcap is not None,
            "a sink per head": x.sink is not None,
            f"scale={getattr(how, 'scale', 1):g}": isinstance(how, Dot)
            and how.scale != max(width, 1) ** -0.5,
        }
        more = "".join(f", {text}" for text, is_so in said.items() if is_so)
        return (
            f"Trace(batch {B}, {heads}, queries {Q}, keys {K}, width {width}, "
            f"{dtype} on {x.q.device}{more}, by {self.backend})"
        )
