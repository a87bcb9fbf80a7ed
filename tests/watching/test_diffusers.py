"""Models of diffusers: their attention is seen, and what they paint stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import interpret, nn
from regard.seen import Seen

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
TOKENS = ["<s>", "two</w>", "cats</w>", "<e>", "<e>", "<e>", "<e>"]


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=8, cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


def families() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]]:
    """A model, what it is given, how it is looked at, and how many layers have words."""
    text, time = torch.randn(1, 7, 24), torch.tensor([5])
    return {
        "unet": (
            unet(),
            {"sample": torch.randn(1, 4, 16, 16), "timestep": 5, "encoder_hidden_states": text},
            {}, 4,
        ),
        "pixart": (
            diffusers.PixArtTransformer2DModel(
                num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8,
                num_layers=2, cross_attention_dim=16, sample_size=8, patch_size=2,
                caption_channels=24, use_additional_conditions=False,
            ),
            {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": time,
             "encoder_hidden_states": text},
            {}, 2,
        ),
        "sd3": (
            diffusers.SD3Transformer2DModel(
                sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
                num_attention_heads=2, joint_attention_dim=24, caption_projection_dim=16,
                pooled_projection_dim=12, out_channels=4, pos_embed_max_size=8,
            ),
            {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": time,
             "encoder_hidden_states": text, "pooled_projections": torch.randn(1, 12)},
            {"text": "last"}, 2,
        ),
        "flux": (
            diffusers.FluxTransformer2DModel(
                patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
                attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
                pooled_projection_dim=12, axes_dims_rope=(4, 4, 8),
            ),
            {"hidden_states": torch.randn(1, 16, 4), "timestep": torch.tensor([0.5]),
             "encoder_hidden_states": text, "pooled_projections": torch.randn(1, 12),
             "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)},
            {"text": "first"}, 2,
        ),
        "wan": (
            diffusers.WanTransformer3DModel(
                patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
                out_channels=4, text_dim=24, freq_dim=16, ffn_dim=32, num_layers=2,
                cross_attn_norm=True, rope_max_seq_len=32,
            ),
            {"hidden_states": torch.randn(1, 4, 3, 8, 12), "timestep": time,
             "encoder_hidden_states": text},
            {"grid": (4, 6), "frames": 3}, 2,
        ),
        "cogvideox": (
            diffusers.CogVideoXTransformer3DModel(
                num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
                time_embed_dim=2, text_embed_dim=24, num_layers=1, sample_width=8, sample_height=8,
                sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=7,
            ),
            {"hidden_states": torch.randn(1, 3, 4, 8, 8), "timestep": time,
             "encoder_hidden_states": text},
            {"text": "first", "frames": 3}, 1,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("family", ["unet", "pixart", "sd3", "flux", "wan", "cogvideox"])
@torch.no_grad()
def test_maps_of_each_family_leave_its_output_alone_to_the_last_bit(family: str) -> None:
    torch.manual_seed(0)
    model, given, how, layers = families()[family]
    model.eval()
    plain = model(**given).sample
    with interpret.grounding(model, TOKENS, keep=["layers", "heads"], **how) as look:
        watched = model(**given).sample
    with regard.watch(model, keep="traces") as seen:
        traced = model(**given).sample
    found = look.found
    assert torch.equal(plain, watched)
    assert torch.allclose(plain, traced, atol=1e-5)
    assert found.words == ("two", "cats")
    assert len(found.layers) == layers
    # All weights of the finest layer at once, then the column of "cats".
    path = found.layers[0]
    first = {"last": -7, "first": 0}.get(how.get("text", "keys"), 0)
    weights = seen[path].trace.weights()[0]
    rows = {"last": slice(None, -7), "first": slice(7, None)}.get(how.get("text"), slice(None))
    expected = weights[:, rows, 2 + first if first >= 0 else first + 2]
    assert torch.allclose(found.maps[1, 0].flatten(1), expected, atol=1e-5)
    by_processors(model, given, how, plain, seen, found)


def by_processors(
    model: Any, given: Any, how: Any, plain: Tensor, seen: Seen, found: interpret.Grounding
) -> None:
    """regard's attention in a model's processors: the same picture, traces and maps; undone."""
    shown: dict[str, regard.Trace] = {}
    own = model.attn_processors
    model.set_attn_processor(nn.attention_processors(model, shown.__setitem__))
    assert torch.allclose(model(**given).sample, plain, atol=1e-5)
    assert shown.keys() == set(seen)
    for path, trace in shown.items():
        assert torch.allclose(trace.weights(), seen[path].trace.weights(), atol=1e-5)
    with interpret.grounding(model, TOKENS, keep=["layers", "heads"], **how) as look:
        model(**given)
    assert torch.allclose(look.found.maps, found.maps, atol=1e-5)
    model.set_attn_processor(own)
    assert torch.equal(model(**given).sample, plain)


@pytest.mark.parametrize("family", ["unet", "pixart"])
@torch.no_grad()
def test_steps_of_a_pipeline_with_guidance_and_its_picture_to_the_last_bit(family: str) -> None:
    torch.manual_seed(0)
    model = families()[family][0].eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    ).eval()  # fmt: skip
    asks: dict[str, Any] = {
        "prompt_embeds": torch.randn(1, 7, 24), "negative_prompt_embeds": torch.randn(1, 7, 24),
        "num_inference_steps": 3, "output_type": "pt", "latents": torch.randn(1, 4, 16, 16),
    }  # fmt: skip
    steps = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    if family == "unet":
        pipe = diffusers.StableDiffusionPipeline(
            vae, None, None, model, steps, None, None, requires_safety_checker=False
        )
    else:
        pipe = diffusers.PixArtAlphaPipeline(None, None, vae, model, steps)
        shown = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
        asks |= {"prompt_attention_mask": shown, "negative_prompt_attention_mask": shown}
        asks |= {"negative_prompt": None, "use_resolution_binning": False}
        asks |= {"latents": torch.randn(1, 4, 8, 8), "height": 8, "width": 8}
    pipe.set_progress_bar_config(disable=True)
    plain = pipe(**asks).images
    with interpret.grounding(model, TOKENS, "cats", keep=["batch", "steps"]) as both:
        watched = pipe(**asks).images
    with interpret.grounding(model, TOKENS, "cats", steps=[0, 2]) as look:
        pipe(**asks)
    assert torch.equal(plain, watched)
    assert both.found.maps.shape[:4] == (1, 2, 3, 1)
    assert look.found.steps == (0, 2)
    assert torch.allclose(look.found.maps, both.found.maps[:, 1, [0, 2]].mean(1), atol=1e-6)


@torch.no_grad()
def test_processors_that_attend_by_hand_are_seen() -> None:
    model = unet().eval()
    given = {"sample": torch.randn(1, 4, 16, 16), "encoder_hidden_states": torch.randn(1, 7, 24)}
    found = []
    for by_hand in (False, True):
        if by_hand:
            model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
        with interpret.grounding(model, TOKENS) as look:
            model(timestep=5, **given)
        found.append(look.found.maps)
    assert torch.allclose(*found, atol=1e-5)


@torch.no_grad()
def test_a_model_that_does_not_list_its_processors() -> None:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    ).eval()  # fmt: skip
    assert not hasattr(model, "set_attn_processor")
    given = {"timestep": torch.tensor([5]), "class_labels": torch.tensor([1])}
    picture, seen = torch.randn(1, 4, 8, 8), []
    want = model(picture, **given).sample
    made = nn.attention_processors(model, lambda path, trace: seen.append(path))
    for path, processor in made.items():
        model.get_submodule(path.removesuffix(".processor")).set_processor(processor)
    torch.testing.assert_close(model(picture, **given).sample, want, atol=1e-5, rtol=1e-5)
    assert seen == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
