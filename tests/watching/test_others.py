"""Attention that others split over ranks or replace: refused by name, never put aside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard import RegardError
from regard.watching.pytorch.split_sequences import split_along_the_sequence

if not distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3)]


@contextlib.contextmanager
def context_parallel(mesh: Any) -> Iterator[None]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    some = torch.zeros(1, 8)
    split = context_parallel(mesh, buffers=[some], buffer_seq_dims=[1])
    with split, sdpa_kernel(SDPBackend.MATH):
        yield


def test_pytorchs_context_parallelism_goes_on_and_is_named(mesh: Any) -> None:
    m, given = Plain(), qkv()
    want = m(*given)
    failing = pytest.raises(RegardError, match=r"\(model\): its sequence is split over ranks")
    with context_parallel(mesh):
        same = m(*given)
        with failing, regard.watch(m) as seen:
            got = m(*given)
    assert torch.equal(got, same)
    torch.testing.assert_close(got, want)
    assert not seen
    with regard.watch(m) as seen:
        m(*given)
    assert seen[""].calls == 1


def test_only_the_axis_of_the_sequence_matters(mesh: Any) -> None:
    def split(placement: Any) -> str | None:
        spread = [DTensor.from_local(t, mesh, [placement], run_check=False) for t in qkv()]
        return split_along_the_sequence(*spread)

    assert "Shard(dim=2)" in str(split(Shard(2)))
    assert [split(placement) for placement in (Replicate(), Shard(0), Shard(1))] == [None] * 3
    assert split_along_the_sequence(*qkv()) is None


def test_heads_that_are_dtensors_are_seen_where_they_are(mesh: Any) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    m, given = Plain(), qkv()
    with regard.watch(m) as want:
        m(*given)
    spread = [DTensor.from_local(t, mesh, [Shard(1)], run_check=False) for t in given]
    with sdpa_kernel(SDPBackend.MATH), regard.watch(m) as seen:
        out = m(*spread)
    assert isinstance(out, DTensor)
    torch.testing.assert_close(seen[""].max_logit, want[""].max_logit)
    unlike = [spread[0], *(t.redistribute(mesh, [Replicate()]) for t in spread[1:])]
    refused = pytest.raises(RegardError, match="spread over ranks unlike each other")
    with sdpa_kernel(SDPBackend.MATH), refused, regard.watch(m):
        m(*unlike)


transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402


def llama(implementation: str = "sdpa") -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    kind = transformers.LlamaForCausalLM
    return kind._from_config(config, attn_implementation=implementation).eval()


IDS = torch.arange(8)[None]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_context_parallelism_of_a_model_that_would_be_switched(mesh: Any, when: str) -> None:
    model = llama()
    failing = pytest.raises(RegardError, match=r"not transformers' own[\s\S]*inner_fn")
    # PyTorch 2.9 leaves its function in place where an error ends the context.
    watch = regard.watch(model)
    if when == "before":
        with context_parallel(mesh), failing:
            watch.attach()
    else:
        watch.attach()
        with context_parallel(mesh), failing:
            model(IDS)
        watch.detach()
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad(), regard.watch(model) as seen:
        model(IDS)
    assert len(seen) == 1


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("kind", ["wrapper", "object"])
def test_functions_of_others_in_transformers_registry(
    kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(own)
    def ulysses(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    class Ulysses:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    other = ulysses if kind == "wrapper" else Ulysses()
    model, mapping = llama(), ALL_ATTENTION_FUNCTIONS._local_mapping
    failing = pytest.raises(
        RegardError, match=r"attn_implementation='sdpa', which is tests\.watching\.test_others\."
    )
    if when == "before":
        monkeypatch.setitem(mapping, "sdpa", other)
        with failing:
            regard.watch(model).attach()
    else:
        with failing, regard.watch(model):
            monkeypatch.setitem(mapping, "sdpa", other)
            model(IDS)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    with torch.no_grad(), regard.watch(model) as seen:
        model(IDS)
    assert len(seen) == 1


def test_sequence_parallelism_under_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed does it: an object keeps the implementation that the model had and calls it with
    all tokens of some heads."""

    class SequenceParallel:
        def __init__(self, core: str) -> None:
            self.core = ALL_ATTENTION_FUNCTIONS[core]

        def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return self.core(module, *args, **kwargs)

    mapping = ALL_ATTENTION_FUNCTIONS._local_mapping
    monkeypatch.setitem(mapping, "ulysses", SequenceParallel("sdpa").forward)
    model = llama("ulysses")
    named = r"'ulysses', which is tests\.watching\.test_others\..*SequenceParallel\.forward"
    with pytest.raises(RegardError, match=named):
        regard.watch(model).attach()
    with pytest.raises(RegardError, match=named):
        regard.Monitor(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, llama_like(model)(IDS).logits)


def llama_like(model: Any) -> Any:
    plain = llama()
    plain.load_state_dict(model.state_dict())
    return plain


def test_flash_attention_of_others_inside_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import flash_attention

    model = llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    with torch.no_grad(), regard.watch(model) as seen:
        model(IDS)
    assert len(seen) == 1
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", lambda *_, **__: None)
    with pytest.raises(RegardError, match=r"'flash_attention_2', which is tests\.watching"):
        regard.watch(model).attach()
