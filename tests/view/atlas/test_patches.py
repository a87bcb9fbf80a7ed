"""Pictures whose patches are tokens: what travels, which layers look at them, what is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.view import Patches
from regard.view.atlas import Atlas
from regard.view.atlas.patches import png
from tests.view.small_traces import drawn


def bytes_of(patches: Patches) -> bytes:
    return base64.b64decode(patches.image.partition("base64,")[2])


def opened(body: bytes) -> torch.Tensor:
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(body))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, -1)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_the_pixels(channels: int) -> None:
    pixels = torch.arange(5 * 7 * channels, dtype=torch.uint8).view(5, 7, channels)
    assert (opened(png(pixels)) == pixels).all()


def test_tensors_files_and_images_are_the_same_picture(tmp_path: Path) -> None:
    picture = drawn(32)
    exact = (255 * picture).round().to(torch.uint8).permute(1, 2, 0)
    given = Patches(picture, (4, 4))
    assert given.image.startswith("data:image/png;base64,")
    assert (opened(bytes_of(given)) == exact).all()
    assert (opened(bytes_of(Patches(exact, (4, 4)))) == exact).all()
    (tmp_path / "p.png").write_bytes(png(exact))
    assert bytes_of(Patches(tmp_path / "p.png", (4, 4))) == png(exact)
    image = pytest.importorskip("PIL.Image").open(tmp_path / "p.png")
    assert (opened(bytes_of(Patches(image, (4, 4)))) == exact).all()
    grey = Patches(torch.rand(6, 9), (2, 3))
    assert opened(bytes_of(grey)).shape == (6, 9, 1)


def test_a_large_tensor_is_shrunk() -> None:
    small = opened(bytes_of(Patches(torch.ones(1, 2500, 1000), (2, 2))))
    assert small.shape == (834, 334, 1)
    assert (small == 255).all()


def test_the_tokens_have_names() -> None:
    patches = Patches(drawn(32), (2, 3), before=["CLS", "register"], after=["end"])
    assert list(patches) == ["CLS", "register", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2", "end"]
    assert patches[2:4] == ["0,0", "0,1"]
    assert "first patch is 2" in repr(patches)


def test_the_frames_of_a_film_stand_below_each_other_in_the_order_of_their_tokens() -> None:
    film = torch.stack([torch.full((3, 8, 12), shade / 4) for shade in range(4)])
    patches = Patches(film, (4, 2, 3), before=["text"])
    assert list(patches)[:8] == ["text", *(f"0:{r},{c}" for r in (0, 1) for c in range(3)), "1:0,0"]
    assert len(patches) == 1 + 4 * 2 * 3
    told = patches.describe()
    assert (told["rows"], told["columns"], told["first"]) == (8, 3, 1)
    shown = opened(bytes_of(patches))
    assert shown.shape == (32, 12, 3)
    # The patch of a token, by where a view finds it: row by row.
    for token, name in list(enumerate(patches))[1:]:
        row = (token - 1) // 3
        assert int(shown[4 * row, 0, 0]) == round(255 * int(name.split(":")[0]) / 4)
    image = pytest.importorskip("PIL.Image").new("RGB", (12, 8), (9, 8, 7))
    assert opened(bytes_of(Patches([image, image], (2, 2, 3))))[15, 11].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    ("picture", "grid", "how", "why"),
    [
        (torch.rand(3, 8, 3), (2, 2), {}, "both ends of it could be the channels"),
        (torch.rand(2, 8, 8), (2, 2), {}, "no end of it is 1 or 3"),
        (torch.rand(1, 3, 8, 8), (2, 2), {}, "give one picture"),
        (torch.randn(3, 8, 8) * 9, (2, 2), {}, "before it was normalised"),
        (torch.full((3, 8, 8), torch.nan), (2, 2), {}, "numbers from 0 to 1"),
        (torch.rand(3, 8, 8), (0, 2), {}, "1 or more of each"),
        (torch.rand(3, 8, 8), (2, 2, 2), {}, "so a film is wanted"),
        (torch.rand(5, 3, 8, 8), (4, 2, 2), {}, "4, and 5 frames"),
        (torch.rand(3, 8, 8), (2, 2), {"before": "CLS"}, "names each token"),
        ("no such file.png", (2, 2), {}, "cannot be read"),
        (__file__, (2, 2), {}, "PNG, JPEG, GIF or WebP"),
        (7, (2, 2), {}, "this is no picture"),
    ],
)
def test_what_is_no_picture_is_refused(
    picture: Any, grid: tuple[int, int], how: dict[str, Any], why: str
) -> None:
    with pytest.raises(regard.RegardError, match=why):
        Patches(picture, grid, **how)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"\x89PNG" + bytes(4_000_000))
    with pytest.raises(regard.RegardError, match="in which the model saw it"):
        Patches(tmp_path / "p.png", (2, 2))


def test_as_many_tokens_as_the_model_has() -> None:
    x = torch.randn(1, 2, 17, 4)
    t = regard.trace(x, x, x)
    index = Atlas.of(t, tokens=Patches(drawn(32), (4, 4), before=["CLS"])).index()
    (picture,) = index["pictures"]
    assert (picture["rows"], picture["columns"], picture["first"]) == (4, 4, 1)
    assert index["maps"][0]["keyText"] == index["maps"][0]["queryText"] == 0
    with pytest.raises(regard.RegardError, match=r"got: *16 tokens"):
        Atlas.of(t, tokens=Patches(drawn(32), (4, 4)))


def test_words_that_look_at_a_picture() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 16, 4)
    t = regard.trace(q, k, k)
    index = Atlas.of(t, tokens=Patches(drawn(32), (4, 4)), queries=["a", "red", "sun"]).index()
    one = index["maps"][0]
    assert index["pictures"][one["keyText"]] is not None
    assert index["pictures"][one["queryText"]] is None


def test_a_model_of_regard_sees_a_picture() -> None:
    torch.manual_seed(0)
    model = regard.nn.MultiHeadAttention(16, 2)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(torch.randn(1, 17, 16))
    index = Atlas.of(seen, tokens=Patches(drawn(32), (4, 4), before=["CLS"])).index()
    assert index["maps"][0]["keyText"] == 0
    assert index["pictures"][0]["first"] == 1


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.mark.parametrize(
    ("kind", "before", "pools"),
    [
        ("ViT", ["CLS"], False),
        ("CLIPVision", ["CLS"], False),
        ("Dinov2", ["CLS"], False),
        ("Dinov2WithRegisters", ["CLS", "R1", "R2", "R3", "R4"], False),
        ("SiglipVision", [], True),
    ],
)
def test_vision_models_see_a_picture(kind: str, before: list[str], pools: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(pixel_values=2 * drawn(32)[None] - 1)
    index = Atlas.of(seen, tokens=Patches(drawn(32), (4, 4), before=before)).index()
    first = index["maps"][0]
    assert first["keyText"] == first["queryText"] == 0
    assert (first["keys"], index["pictures"][0]["first"]) == (16 + len(before), len(before))
    if pools:  # One query gathers the whole picture.
        assert (index["maps"][-1]["queries"], index["maps"][-1]["keyText"]) == (1, 0)
