"""Monitor and QK-clip where several ranks train one model, against one process that trains it."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError
from regard.monitoring.telemetry import Readings
from regard.watching import Watch
from tests.monitoring.two_ranks import outcomes

if not distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDE = 12


class Attention(nn.Module):
    """Causal, with `heads` of width 3, which share `groups` key heads."""

    def __init__(self, heads: int = 3, groups: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDE, heads * 3, bias=bias)
        self.k_proj = nn.Linear(WIDE, groups * 3, bias=bias)
        self.v_proj = nn.Linear(WIDE, groups * 3, bias=bias)
        self.o_proj = nn.Linear(heads * 3, WIDE, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = (getattr(self, f"{name}_proj")(x) for name in "qkv")
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in parts)
        return self.o_proj(self.mixed(q, k, v).transpose(1, 2).flatten(2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Fused(Attention):
    """One projection for queries, keys and values."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__(heads)
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Linear(WIDE, 9 * heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 3)).permute(2, 0, 3, 1, 4)
        return self.o_proj(self.mixed(q, k, v).transpose(1, 2).flatten(2))


class Latent(Attention):
    """Multi-head latent attention: 2 of 3 numbers are not rotated, 1 is, which keys share."""

    qk_nope_head_dim = 2

    def __init__(self) -> None:
        super().__init__(bias=False)
        del self.q_proj, self.k_proj, self.v_proj
        self.q_a_proj, self.q_a_layernorm = nn.Linear(WIDE, 5), nn.LayerNorm(5)
        self.q_b_proj = nn.Linear(5, 9, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDE, 6)
        self.kv_a_layernorm = nn.LayerNorm(5)
        self.kv_b_proj = nn.Linear(5, 15, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (3, 3))
        down, shared = self.kv_a_proj_with_mqa(x).split([5, 1], -1)
        still, v = self.kv_b_proj(self.kv_a_layernorm(down)).unflatten(-1, (3, 5)).split([2, 3], -1)
        k = torch.cat([still, shared[:, :, None].expand(*still.shape[:3], 1)], -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o_proj(self.mixed(q, k, v).transpose(1, 2).flatten(2))


class MultiHead(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(WIDE, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Blocks(nn.Module):
    """Attention layers around residuals; recomputed in the backward pass if that is asked for."""

    def __init__(self, *layers: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            out = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = x + out
        return x


def text(seed: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 6 * torch.randn(batch, 7, WIDE, generator=generator)


def whole(model: nn.Module) -> dict[str, Tensor]:
    held = ((name, p.detach()) for name, p in model.named_parameters())
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in held}


def monitor(model: nn.Module, **options: Any) -> regard.Monitor:
    options = {"every": 1, "look": 1, "rules": (), "on_error": "raise"} | options
    return regard.Monitor(model, **options)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that are asked for meanwhile."""
    made: list[str] = []
    own, gather = distributed.all_reduce, distributed.all_gather_object

    def reduce(tensor: Tensor, op: Any, group: Any = None) -> None:
        made.append("MAX" if op == distributed.ReduceOp.MAX else "SUM")
        own(tensor, op, group)

    def gathered(*args: Any, **kwargs: Any) -> None:
        made.append("layout")
        gather(*args, **kwargs)

    distributed.all_reduce, distributed.all_gather_object = reduce, gathered
    try:
        yield made
    finally:
        distributed.all_reduce, distributed.all_gather_object = own, gather


def alike(got: regard.monitoring.Report, want: regard.monitoring.Report) -> None:
    assert list(got.layers) == list(want.layers)
    assert got.looks == want.looks
    for path, heads in want.layers.items():
        for name, numbers in vars(heads).items():
            assert getattr(got.layers[path], name) == pytest.approx(numbers, rel=2e-5, nan_ok=True)


def one_process(model: nn.Module, *texts: Tensor, **options: Any) -> regard.monitoring.Report:
    """What a monitor that asks nobody reports of a step."""
    alone = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
    with monitor(model, group=alone, **options) as watching:
        for x in texts:
            model(x)
        report = watching.step()
    assert report is not None
    return report


def data_parallel(rank: int, folder: Path) -> None:
    m = Blocks(Attention())
    reports: list[Any] = []
    path = folder / "run.jsonl"
    want = one_process(copy.deepcopy(m), text(0), 5 * text(1), qk_clip=2.0, logits=True)
    with monitor(m, qk_clip=2.0, logits=True, to=[str(path), reports.append]) as watching:
        m((1 + 4 * rank) * text(rank))
        report = watching.step()
    assert report is not None
    alike(report, want)
    assert sum(report.layers["layers.0"].clipped) > 0
    assert len(report.layers["layers.0"].min_logit) == 3
    assert len(reports) == (rank == 0)
    if rank == 0:
        assert len(path.read_text().splitlines()) == 1
    weights = [torch.empty_like(m.layers["0"].q_proj.weight) for _ in (0, 1)]
    distributed.all_gather(weights, m.layers["0"].q_proj.weight.detach())
    assert torch.equal(*weights)


def a_rank_that_cannot_look(rank: int, folder: Path) -> None:
    m = Blocks(Attention())
    own, told = Readings.of, []
    watching = monitor(m, every=4, qk_clip=2.0, on_error="warn")
    for step in range(4):
        # In the first step, too: who has seen nothing yet takes part.
        if rank == 1 and step in (0, 2):
            Readings.of = staticmethod(_broken)  # type: ignore[method-assign, assignment]
        if rank == 1 and step == 3:
            Watch.enter = _broken  # type: ignore[method-assign]
        m((1 + 9 * rank) * text(step))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = watching.step()
        told += [str(warning.message) for warning in caught]
        Readings.of = own  # type: ignore[method-assign]
    Watch.enter = _enter  # type: ignore[method-assign]
    assert report is not None
    assert report.looks == 4
    assert len(told) == rank, told
    both = [torch.empty_like(m.layers["0"].k_proj.weight) for _ in (0, 1)]
    distributed.all_gather(both, m.layers["0"].k_proj.weight.detach())
    assert torch.equal(*both)
    watching.close()


_enter = Watch.enter


def _broken(*_: Any, **__: Any) -> Any:
    raise OSError("no memory left")


def fully_sharded(rank: int, folder: Path) -> None:
    """Heads of 3 rows on shards of 5 and 4, 2 and 1: trained and clipped as unsharded, bit for
    bit."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layers in ([Attention()], [Fused()], [Latent()], [MultiHead()]):
        for again in (False, True) if isinstance(layers[0], Attention) else (False,):
            plain = Blocks(*layers, again=again)
            sharded = copy.deepcopy(plain)
            # What is sharded with the root stays gathered after a forward pass.
            for layer in () if isinstance(layers[0], Fused) else sharded.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            reports = []
            for m in (plain, sharded):
                optimiser = torch.optim.SGD(m.parameters(), lr=0.1)
                with monitor(m, every=3, qk_clip=0.5) as watching:
                    for step in range(3):
                        m(text(2 * step + rank)).square().mean().backward()
                        for p in m.parameters() if m is plain else ():
                            assert p.grad is not None
                            distributed.all_reduce(p.grad)
                            p.grad /= 2
                        optimiser.step()
                        optimiser.zero_grad()
                        if step == 2:
                            # Gathered by a forward pass that nothing follows.
                            with torch.no_grad():
                                m(text(0))
                        reports.append(watching.step())
            alike(reports[5], reports[2])
            heads = reports[5].layers["layers.0"]
            assert sum(heads.clipped) > 0
            assert heads.empty == (0.0,) * len(heads)
            sharded.reshard()
            got, want = whole(sharded), whole(plain)
            for name, p in want.items():
                assert torch.equal(got[name], p), (type(layers[0]), name)


def tensor_parallel(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plain = Blocks(Attention(4, 2))
    split = copy.deepcopy(plain)
    plan: dict[str, Any] = {f"layers.0.{name}_proj": ColwiseParallel() for name in "qkv"}
    parallelize_module(split, mesh["tp"], plan | {"layers.0.o_proj": RowwiseParallel()})
    fully_shard(split, mesh=mesh["dp"])
    want = one_process(plain, text(0), qk_clip=2.0)
    with monitor(split, qk_clip=2.0) as watching:
        split(text(0))
        report = watching.step()
    assert report is not None
    alike(report, want)
    assert sum(report.layers["layers.0"].clipped) > 0
    got = whole(split)
    for name, p in whole(plain).items():
        torch.testing.assert_close(got[name], p, rtol=1e-5, atol=1e-6)


class AllGathered(Attention):
    """Context parallelism by gathering keys: each rank has some of the queries."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = ([torch.empty_like(t) for _ in (0, 1)] for t in (k, v))
        distributed.all_gather(keys, k.detach().contiguous())
        distributed.all_gather(values, v.detach().contiguous())
        at = distributed.get_rank() * q.shape[2] + torch.arange(q.shape[2])
        seen = torch.arange(2 * q.shape[2]) <= at[:, None]
        return F.scaled_dot_product_attention(
            q, torch.cat(keys, 2), torch.cat(values, 2), seen, enable_gqa=True
        )


def context_parallel(rank: int, folder: Path) -> None:
    plain, split = Blocks(Attention()), Blocks(AllGathered())
    split.load_state_dict(plain.state_dict())
    x = torch.cat([text(0), text(1)], 1)
    # Their masks are tables, under which the spread of logits takes a walk.
    want = one_process(plain, x, qk_clip=2.0, logits=True)
    with monitor(split, qk_clip=2.0, logits=True) as watching:
        split(x[:, 7 * rank :][:, :7])
        report = watching.step()
    assert report is not None
    alike(report, want)
    for name, p in whole(plain).items():
        torch.testing.assert_close(whole(split)[name], p)


def pipeline(rank: int, folder: Path) -> None:
    """The first stage holds no attention, and takes part all the same."""
    plain = Blocks(nn.Linear(WIDE, WIDE), Attention(), Attention(4, 2))
    stage = copy.deepcopy(plain)
    for name in ("1", "2") if rank == 0 else ("0",):
        del stage.layers[name]
    given = plain.layers["0"](text(0)) + text(0)
    want = one_process(plain, text(0), qk_clip=2.0)
    with monitor(stage, qk_clip=2.0) as watching:
        stage((text(0), given)[rank])
        report = watching.step()
    assert report is not None
    alike(report, want)
    left = whole(stage)
    assert all(torch.equal(left[name], p) for name, p in whole(plain).items() if name in left)


def collectives(rank: int, folder: Path) -> None:
    m = Blocks(Attention(), Attention(4, 2))
    for clip, between in ((None, {}), (2.0, {"MAX": 3})):
        with counted() as made, monitor(m, every=3, qk_clip=clip) as watching:
            for window in range(2):
                for _ in range(3):
                    m(text(rank))
                    if clip is None:
                        assert "SUM" not in made, "nothing is said before the window ends"
                    watching.step()
                once = {"layout": 1} if window == 0 else {}
                assert Counter(made) == Counter(once) + Counter(between) + Counter(["SUM", "MAX"])
                made.clear()
        assert not made
    # A layer that runs for the first time in a later window: all ranks learn of it.
    m.layers["1"].requires_grad_(False)
    late = Blocks(m.layers["0"])
    with counted() as made, monitor(late) as watching:
        late(text(rank))
        watching.step()
        if rank == 1:
            late.layers["late"] = m.layers["1"]
            watching._watch.detach()
            watching._watch.attach()
        made.clear()
        late(text(rank))
        report = watching.step()
    assert made == ["MAX", "SUM", "layout", "MAX", "SUM"]
    assert list(report.layers) == ["layers.0", "layers.late"]


class Ulysses(Attention):
    """Sequence parallelism by all-to-all: each rank attends with some of the heads."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.num_heads = 4

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_swapped(t, 1, 2) for t in (q, k, v))
        return _swapped(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)


def _swapped(t: Tensor, split: int, join: int) -> Tensor:
    given = [part.contiguous() for part in t.detach().chunk(2, split)]
    taken = [torch.empty_like(part) for part in given]
    distributed.all_to_all(taken, given)
    return torch.cat(taken, join)


def ulysses(rank: int, folder: Path) -> None:
    """Seen exactly, head by head; but whose heads they are cannot be known, and is not guessed."""
    plain, split = Blocks(Attention(4, 4)), Blocks(Ulysses())
    split.load_state_dict(plain.state_dict())
    x = torch.cat([text(0), text(1)], 1)
    mine = x[:, 7 * rank :][:, :7]
    want = one_process(plain, x)
    with regard.watch(split) as seen:
        split(mine)
    heads = want.layers["layers.0"].max_logit[2 * rank :][:2]
    assert seen["layers.0"].max_logit.tolist() == pytest.approx(heads)
    watching = monitor(split, on_error="warn")
    split(mine)
    with pytest.warns(regard.RegardWarning, match="which of a layer's heads this rank") as told:
        report = watching.step()
    assert "called with 2 heads of 4" in str(told[0].message)
    assert report is not None
    assert not report.layers
    watching.close()
    groups = [distributed.new_group([r]) for r in (0, 1)]
    with monitor(split, group=groups[rank]) as watching:
        split(mine)
        report = watching.step()
    assert report is not None
    assert report.layers["layers.0"].max_logit == pytest.approx(heads)


def pytorchs_context_parallel(rank: int, folder: Path) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    m, mesh = Plain(), init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    # Split into quarters, of which each rank has an early and a late one.
    quarters = m(q, k, v).chunk(4, 2)
    want = torch.cat([quarters[rank], quarters[3 - rank]], 2)
    split = context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
    refused = pytest.raises(RegardError, match="its sequence is split over ranks")
    with split, sdpa_kernel(SDPBackend.MATH):
        with refused, regard.watch(m):
            got = m(q, k, v)
        watching = monitor(m, on_error="warn")
        m(q, k, v)
        with pytest.warns(regard.RegardWarning, match="its sequence is split over ranks"):
            report = watching.step()
        watching.close()
    torch.testing.assert_close(got, want)
    assert report is not None
    assert not report.layers


def ring_of_others(rank: int, folder: Path) -> None:
    """Half of the keys in each call: right for who merges them, wrong for who looks."""
    own = F.scaled_dot_product_attention

    def ring(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        halves = zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
        return sum((own(q, *half, enable_gqa=True) for half in halves), torch.zeros(()))

    m = Blocks(Attention())
    F.scaled_dot_product_attention = ring
    try:
        with pytest.raises(RegardError, match=r"on one of several ranks[\s\S]*ring_of_others"):
            regard.watch(m).attach()
        with pytest.raises(RegardError, match="on one of several ranks"):
            monitor(m)
    finally:
        F.scaled_dot_product_attention = own


def ranks_that_disagree(rank: int, folder: Path) -> None:
    m = Blocks(Attention(3 + rank))
    watching = monitor(m, on_error="warn")
    m(text(0))
    with pytest.warns(regard.RegardWarning, match=r"ranks disagree[\s\S]*\[3, 4\] heads"):
        watching.step()
    watching.close()


def one_rank_ends_early(rank: int, folder: Path) -> None:
    """It asks the others for nothing on its way out."""
    m = Blocks(Attention())
    watching = monitor(m, every=5)
    with counted() as made, suppress(OSError), watching:
        m(text(0))
        watching.step()
        raise OSError("no memory left")
    assert not made


def meshes(rank: int, folder: Path) -> None:
    m = Blocks(Attention())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with counted() as made, monitor(m, group=mesh["dp"]) as watching:
        m(text(rank))
        watching.step()
    assert not made
    with pytest.raises(RegardError, match="a DeviceMesh of one dimension"):
        monitor(m, group=mesh)


def alike_on_all(numbers: Any) -> None:
    both: list[Any] = [None, None]
    distributed.all_gather_object(both, numbers)
    assert both[0] == both[1]


def loop_of_fsdp(rank: int, folder: Path) -> None:
    from examples.fsdp_loop import train

    reports = train()
    assert [(report.step, report.looks) for report in reports] == [(3, 3), (6, 3)]
    paths = [f"layers.{i}._checkpoint_wrapped_module.attention" for i in (0, 1)]
    assert list(reports[1].layers) == paths
    assert sum(sum(heads.clipped) for heads in reports[1].layers.values()) > 0
    alike_on_all([report.layers for report in reports])


def loop_of_accelerate(rank: int, folder: Path) -> None:
    pytest.importorskip("accelerate")
    from examples.accelerate_loop import train

    model, reports = train()
    assert [(report.step, report.looks) for report in reports] == [(2, 2), (4, 2)]
    heads = reports[1].layers["model.layers.0.self_attn"]
    assert sum(heads.clipped) > 0
    alike_on_all([report.layers for report in reports])
    alike_on_all([p.sum().item() for p in model.parameters()])


CASES = {
    case.__name__: case
    for case in (
        data_parallel, a_rank_that_cannot_look, fully_sharded, tensor_parallel, context_parallel,
        pipeline, collectives, ulysses, pytorchs_context_parallel, ring_of_others,
        ranks_that_disagree, one_rank_ends_early, meshes, loop_of_fsdp, loop_of_accelerate,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return outcomes(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, said: dict[str, list[str]]) -> None:
    wrong = [f"rank {rank}: {words}" for rank, words in enumerate(said[case]) if words]
    assert not wrong, "\n".join(wrong)
