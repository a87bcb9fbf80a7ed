"""Predicted memory against what a process really takes, and what autograd really keeps."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu, softmax

from regard import cost, masks
from tests.fresh_process import FreshProcesses

# A peak is that of a process, and allocators keep what was freed: each case runs in a fork of one
# that has imported everything and computed nothing. With a threshold that does not move (mallopt's
# M_MMAP_THRESHOLD), tensors that are freed go back to the system.
PEAKS = """
from __future__ import annotations
import ctypes, json, os, torch
from torch import nn
from types import SimpleNamespace
from torch.nn.functional import scaled_dot_product_attention

assert ctypes.CDLL(None).mallopt(-3, 1 << 17) == 1
%s

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

def eager(q, k, v):
    n = q.shape[2]
    mask = torch.full((n, n), -torch.inf, dtype=q.dtype).triu_(1)[None, None]
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    return eager_attention_forward(module, q, k, v, mask, 0.125)

def fused(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

def peak(how, dtype, B, H, G, n, D):
    run = {"eager": eager, "fused": fused}[how]
    q, k, v = (torch.ones(B, h, n, D, dtype=getattr(torch, dtype)) for h in (H, G, G))
    run(*(t[:1, :, :64] for t in (q, k, v)))
    before = memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    run(q, k, v)
    return memory("VmHWM") - before

torch.set_grad_enabled(False)
found = []
for case in json.loads(%r):
    ours, theirs = os.pipe()
    if not os.fork():
        os.write(theirs, str(peak(*case)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        found.append(int(said.read()))
    os.wait()
print(json.dumps(found))
"""

CASES = [
    ("eager", "float32", 1, 4, 4, 2048, 64),
    ("eager", "float32", 1, 8, 2, 1500, 64),
    ("eager", "bfloat16", 1, 4, 4, 2048, 64),
    ("eager", "float16", 2, 4, 1, 1024, 64),
    ("eager", "float32", 16, 8, 2, 256, 256),
    ("eager", "float32", 16, 8, 1, 256, 256),
    ("fused", "float32", 256, 8, 8, 128, 64),
    ("fused", "float32", 32, 8, 2, 512, 128),
    ("fused", "float32", 512, 16, 4, 256, 8),
    ("fused", "bfloat16", 256, 8, 8, 128, 64),
]


QUICK = {
    "float32": True,
    "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported() and platform.machine() != "aarch64",
}
"""Whether PyTorch has products of such matrices that do not take minutes on this CPU."""
POSSIBLE = [case for case in CASES if QUICK[case[1]]]


@pytest.fixture(scope="module")
def peaks(fresh: FreshProcesses) -> dict[tuple[object, ...], int]:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks of a process are read from Linux")
    from transformers.models.llama import modeling_llama as llama

    # Their lines alone: to import transformers takes longer than all cases.
    theirs = map(inspect.getsource, (llama.repeat_kv, llama.eager_attention_forward))
    done = fresh(PEAKS % ("\n".join(theirs), json.dumps(POSSIBLE)))
    assert done.code == 0, done.err
    return dict(zip(POSSIBLE, json.loads(done.out.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peaks_are_predicted_within_ten_percent(
    peaks: dict[tuple[object, ...], int], case: tuple[str, str, int, int, int, int, int]
) -> None:
    how, dtype, B, H, G, n, D = case
    if not QUICK[dtype]:
        pytest.skip(f"products of {dtype} take minutes on a CPU without instructions for them")
    q, k = (torch.empty(B, h, n, D, dtype=getattr(torch, dtype), device="meta") for h in (H, G))
    found = cost.call(q, k, k, mask=masks.causal())
    predicted = found.eager.peak if how == "eager" else found.fused.peak
    if (how, dtype) == ("fused", "bfloat16"):
        # In half precision PyTorch's CPU kernel may copy keys and values into another order.
        packed = 2 * k.numel() * k.element_size()
        near = [abs(peaks[case] / p - 1) < 0.1 for p in (predicted, predicted + packed)]
        assert any(near), f"{peaks[case]} for {predicted}"
        return
    assert predicted == pytest.approx(peaks[case], rel=0.1)


def kept(run: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """The bytes of all memory that autograd keeps, parameters left out."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(held.values()) - sum(held.get(p.untyped_storage().data_ptr(), 0) for p in parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_what_eager_attention_keeps_is_exact(key_heads: int, dtype: str) -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    q, k, v = (
        torch.randn(2, h, 48, 16, dtype=getattr(torch, dtype), requires_grad=True)
        for h in (4, key_heads, key_heads)
    )
    module = SimpleNamespace(num_key_value_groups=4 // key_heads, training=False)
    found = kept(lambda: eager_attention_forward(module, q, k, v, None, 0.25)[0], [])
    assert found == cost.call(q, k, v).eager.kept


@pytest.mark.parametrize("key_heads", [4, 2])
def test_what_fused_attention_keeps_is_exact(key_heads: int) -> None:
    q, k, v = (torch.randn(2, h, 48, 16, requires_grad=True) for h in (4, key_heads, key_heads))
    found = kept(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), [])
    assert found == cost.call(q, k, v).fused.kept


@pytest.mark.parametrize("how", ["eager", "fused"])
def test_what_a_whole_layer_keeps_is_exact(how: str) -> None:
    B, H, G, N, D, F = 2, 4, 2, 40, 8, 96
    width = H * D
    c = cost.Configuration("one", width, H, 1, key_heads=G, feed_forward=F, gated=True,
                           dtype="float32")  # fmt: skip
    to_q, to_k, to_v, output, gate, up, down = (
        nn.Linear(i, o, bias=False)
        for i, o in [(width, width), (width, G * D), (width, G * D), (width, width),
                     (width, F), (width, F), (F, width)]
    )  # fmt: skip
    x, y = (torch.randn(B, N, width, requires_grad=True) for _ in range(2))

    def heads(t: Tensor, n: int) -> Tensor:
        # As projections made for one head after another leave them: no copy is kept.
        return t.unflatten(-1, (n, D)).transpose(1, 2)

    def run() -> Tensor:
        q, k, v = heads(to_q(x), H), heads(to_k(x), G), heads(to_v(x), G)
        if how == "fused":
            mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            q = q.contiguous()
            k, v = (t.repeat_interleave(H // G, 1) for t in (k, v))
            mixed = softmax(q @ k.mT / D**0.5, -1) @ v
        inner = down(silu(gate(y)) * up(y))
        return output(mixed.transpose(1, 2).flatten(2)).sum() + inner.sum()

    modules = (to_q, to_k, to_v, output, gate, up, down)
    found = kept(run, [m.weight for m in modules])
    predicted = cost.model(c, N, batch=B)
    assert found == getattr(predicted, how).kept


def test_fused_is_linear_and_eager_quadratic() -> None:
    small, large = (cost.layer(768, 12, n) for n in (4096, 8192))
    assert large.fused.peak == 2 * small.fused.peak
    assert large.eager.peak == 4 * small.eager.peak


def test_fused_bytes_are_the_least_and_lse() -> None:
    q, k = (torch.empty(2, h, 100, 16, device="meta") for h in (4, 2))
    found = cost.call(q, k, k)
    x = 4 * (2 * 4 * 100 * 16 * 2 + 2 * 2 * 100 * 16 * 2)
    assert found.bytes_moved("fused") == x + 4 * 2 * 4 * 100


def test_eager_bytes_step_by_step() -> None:
    # float32, one head, no mask: scores written, scaled (read, written), softmax (read, written),
    # read again: six passes. q, k and v are read once; the mixed values written, and copied.
    n, d = 64, 16
    x = torch.empty(1, 1, n, d, device="meta")
    assert cost.call(x, x, x).bytes_moved("eager") == 4 * (6 * n * n + 6 * n * d)
    # Keys and values repeated for heads that share them: read, written, and read for each head.
    y = torch.empty(1, 4, n, d, device="meta")
    shared = cost.call(y, x, x).bytes_moved("eager")
    assert shared == 4 * (4 * (6 * n * n + 6 * n * d) + 2 * n * d + 2 * 4 * n * d)
    # A mask is read once, and is one more pass to read and one to write.
    masked = cost.call(x, x, x, mask=masks.causal()).bytes_moved("eager")
    assert masked == 4 * (9 * n * n + 6 * n * d)
