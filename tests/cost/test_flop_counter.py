"""Against PyTorch's counter where that counts right, and where it does not, by how much."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from regard import cost, masks

B, H, N, D = 2, 4, 96, 16


def counted(run: object, *inputs: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*inputs)  # type: ignore[operator]
    return counter.get_total_flops()


def qkv(**how: object) -> list[Tensor]:
    return [torch.randn(B, H, N, D, **how) for _ in range(3)]  # type: ignore[arg-type]


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT, -1) @ v


def test_eager_attention_forward_and_training() -> None:
    q, k, v = qkv(requires_grad=True)
    found = cost.call(q, k, v)
    assert counted(eager, q, k, v) == found.flops("dense")
    whole = counted(lambda *x: eager(*x).sum().backward(), q, k, v)
    assert whole == found.flops("dense", "training")


def test_a_layer_forward_and_training() -> None:
    width = H * D
    project, output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
    x = torch.randn(B, N, width, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return output(eager(q, k, v).transpose(1, 2).flatten(2))

    found = cost.layer(width, H, N, batch=B)
    assert counted(run, x) == found.flops("dense")
    assert counted(lambda x: run(x).sum().backward(), x) == found.flops("dense", "training")


def test_it_counts_causal_as_full() -> None:
    q, k, v = qkv(device="meta")
    found = cost.call(q, k, v, mask=masks.causal())
    theirs = counted(lambda *x: eager(*x), q, k, v)
    assert theirs == sdpa_flop_count(q.shape, k.shape, v.shape) == found.flops("dense")
    # n(n + 1)/2 of n² pairs.
    assert found.flops("needed") * 2 * N == theirs * (N + 1)


def test_it_does_not_count_the_fused_kernel_of_a_cpu_at_all() -> None:
    q, k, v = qkv()
    theirs = counted(lambda *x: scaled_dot_product_attention(*x, is_causal=True), q, k, v)
    assert theirs == 0
    assert cost.call(q, k, v, mask=masks.causal()).flops("needed") > 0


def test_backward_it_counts_the_scores_again_as_fused_kernels_do() -> None:
    q, k, v = qkv(device="meta")
    found = cost.call(q, k, v)
    theirs = sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert theirs == found.flops("executed", "backward")
    assert theirs - found.flops("dense", "backward") == found.part("scores").flops("dense")
    causal = cost.call(q, k, v, mask=masks.causal(), tile=(32, 32))
    assert causal.flops("needed") < causal.flops("executed") < causal.flops("dense")
    assert causal.flops("executed", "backward") == 2.5 * causal.flops("executed")
    assert causal.flops("needed", "backward") == 2 * causal.flops("needed")


def test_grouped_heads_save_projections_and_no_pairs() -> None:
    q, k = (torch.empty(B, heads, N, D, device="meta") for heads in (H, 1))
    assert cost.call(q, k, k).flops("dense") == sdpa_flop_count(q.shape, k.shape, k.shape)
    shared = cost.layer(H * D, H, N, key_heads=1).part("projections").macs.dense
    assert shared * 3 * H == cost.layer(H * D, H, N).part("projections").macs.dense * (H + 2)


def test_a_mixture_of_experts_and_its_router(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        intermediate_size=96, vocab_size=101, num_local_experts=6, num_experts_per_tok=2,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model, text = MixtralForCausalLM(config).eval(), torch.randint(101, (2, 24))
    found = cost.model(cost.Configuration.from_json(tmp_path), 24, batch=2)
    assert counted(model, text) == found.flops("dense")
    # By hand: the choice among six, and three matrices of each of two.
    assert found.part("router").macs.dense == 3 * 48 * 64 * 6
    assert found.part("feed-forward").macs.dense == 3 * 48 * 2 * 3 * 64 * 96
    # What transformers runs unless told otherwise is not counted by PyTorch.
    model.set_experts_implementation("grouped_mm")
    assert counted(model, text) == found.flops("dense") - found.part("feed-forward").flops()
