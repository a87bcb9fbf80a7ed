"""The tokens of a picture, or of a film: patches row by row, with what they were cut from."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import UInt8
from torch import Tensor

from regard.errors import RegardError
from regard.view.atlas.tensor_bytes import to_bytes

KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""The first bytes of the files that every browser shows."""
LARGEST = 4_000_000
"""Bytes of a file that goes into a page as it is."""
LONGEST = 1024
"""Pixels along the longer side of a picture that was given as numbers; a larger one is shrunk."""


class Patches(Sequence[str]):
    """The tokens of a picture, to be given as `tokens=` (or `queries=`) of any view.

    `picture` is what the model saw, cropped as it was but not normalised: a file (PNG, JPEG, GIF or
    WebP), a tensor `[channels, height, width]` or `[height, width, channels]` of bytes or of
    numbers from 0 to 1, or an image of Pillow. `grid` counts the patches down and across; `before`
    and `after` name the tokens around them.

    A film is a list of pictures, or a tensor `[frames, channels, height, width]` or `[frames,
    height, width, channels]`, with `grid=(frames, rows, columns)`. Views show its frames one below
    the other: so their tokens stay in order. A model may see fewer frames than it shows; then give
    as many as it sees.

    >>> patches = Patches(torch.zeros(3, 32, 48), grid=(2, 3), before=["CLS"])
    >>> list(patches)
    ['CLS', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2']
    >>> list(Patches(torch.zeros(2, 3, 8, 16), grid=(2, 1, 2)))
    ['0:0,0', '0:0,1', '1:0,0', '1:0,1']
    """

    def __init__(
        self,
        picture: str | os.PathLike[str] | Tensor | Any,
        grid: tuple[int, int] | tuple[int, int, int],
        *,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
    ) -> None:
        if len(grid) not in (2, 3) or min(grid) < 1:
            raise RegardError(
                "grid= counts patches down and across, of a film its frames first",
                got=repr(grid),
                accepted="(rows, columns) or (frames, rows, columns), 1 or more of each",
            )
        rows, columns = grid[-2:]
        self.frames = grid[0] if len(grid) == 3 else 1
        if len(grid) == 3:
            picture = _one_below_the_other(picture, self.frames)
        for name, words in (("before", before), ("after", after)):
            if isinstance(words, str):
                raise RegardError(
                    f"{name}= names each token", got=repr(words), accepted=f"[{words!r}]"
                )
        self.grid = rows, columns
        self.first = len(before)
        names = [f"{row},{column}" for row in range(rows) for column in range(columns)]
        film = [f"{frame}:{name}" for frame in range(self.frames) for name in names]
        patches = film if len(grid) == 3 else names
        self._names = [*before, *patches, *after]
        kind, body = _encoded(picture)
        self.image = f"data:image/{kind};base64,{base64.b64encode(body).decode()}"

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        return self._names[place]

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        film = f"{self.frames} frames, " if self.frames > 1 else ""
        return (
            f"Patches({len(self)} tokens, {film}grid={self.grid}, the first patch is {self.first})"
        )

    def describe(self) -> dict[str, Any]:
        """The picture as the front end receives it."""
        rows, columns = self.grid
        down = self.frames * rows
        return {"image": self.image, "rows": down, "columns": columns, "first": self.first}


def _one_below_the_other(film: Any, frames: int) -> UInt8[Tensor, "height width channels"]:
    """The frames of a film as one picture."""
    four = isinstance(film, Tensor) and film.ndim == 4
    if not four and not isinstance(film, list | tuple):
        raise RegardError(
            "grid= has frames, so a film is wanted",
            got=type(film).__name__ if not isinstance(film, Tensor) else str(list(film.shape)),
            accepted="a list of pictures (tensors, or images of Pillow), or a tensor [frames, "
            "channels, height, width] or [frames, height, width, channels]",
        )
    if len(film) != frames:
        raise RegardError(
            "grid= begins with the number of frames", got=f"{frames}, and {len(film)} frames",
            do="give the frames that the model sees, one for each of its own",
        )  # fmt: skip
    shown = [pixels_of(frame if isinstance(frame, Tensor) else _of_pillow(frame)) for frame in film]
    if len({tuple(frame.shape) for frame in shown}) > 1:
        raise RegardError(
            "the frames of a film are of one size",
            got=", ".join(sorted({str(list(frame.shape)) for frame in shown})),
        )
    return torch.cat(shown)


def _of_pillow(image: Any) -> UInt8[Tensor, "height width 3"]:
    if not (callable(getattr(image, "tobytes", None)) and hasattr(image, "mode")):
        raise RegardError(
            "this is no frame of a film",
            got=type(image).__name__,
            accepted="a tensor of pixels, or an image of Pillow",
        )
    pixels = bytearray(image.convert("RGB").tobytes())
    return torch.frombuffer(pixels, dtype=torch.uint8).reshape(image.height, image.width, 3)


def _encoded(picture: Any) -> tuple[str, bytes]:
    """The kind and the bytes of a file that a browser shows."""
    if isinstance(picture, str | os.PathLike):
        return _of_file(Path(picture))
    if isinstance(picture, Tensor):
        return "png", png(pixels_of(picture))
    if callable(getattr(picture, "save", None)) and hasattr(picture, "mode"):
        kept = io.BytesIO()
        picture.convert("RGB").save(kept, "PNG")
        return "png", kept.getvalue()
    raise RegardError(
        "this is no picture",
        got=type(picture).__name__,
        accepted="the path of a file, a tensor of pixels, or an image of Pillow",
    )


def _of_file(path: Path) -> tuple[str, bytes]:
    try:
        body = path.read_bytes()
    except OSError as error:
        raise RegardError("the picture cannot be read", got=f"{path}: {error}") from None
    kind = next((kind for start, kind in KINDS.items() if body.startswith(start)), None)
    if kind is None or (kind == "webp" and body[8:12] != b"WEBP"):
        raise RegardError(
            "this file is no picture that browsers show",
            got=str(path),
            accepted="PNG, JPEG, GIF or WebP",
        )
    if len(body) > LARGEST:
        raise RegardError(
            "the picture is too large to travel with a page",
            got=f"{len(body):,} bytes",
            accepted=f"up to {LARGEST:,}",
            do="give it in the size in which the model saw it",
        )
    return kind, body


def pixels_of(picture: Tensor) -> UInt8[Tensor, "height width channels"]:
    """Bytes of red, green and blue, or of grey, from what was given."""
    shape = tuple(picture.shape)
    if picture.ndim == 2:
        picture = picture[..., None]
    first, last = (picture.ndim == 3 and picture.shape[side] in (1, 3) for side in (0, -1))
    if first == last:
        both = "both ends of it could be the channels" if first else "no end of it is 1 or 3"
        raise RegardError(
            "the channels of a picture are its first or its last dimension",
            got=f"{shape}: {both}",
            accepted="[channels, height, width], [height, width, channels] or [height, width]",
            do="give one picture, in grey as [height, width] if need be",
        )
    picture = picture.detach().cpu()
    if first:
        picture = picture.permute(1, 2, 0)
    if picture.dtype != torch.uint8:
        picture = picture.float()
        low, high = picture.aminmax()
        if not (low >= 0 and high <= 1):
            raise RegardError(
                "pixels are bytes, or numbers from 0 to 1",
                got=f"{low:.3g} to {high:.3g}",
                do="give the picture before it was normalised, or undo it: x * std + mean",
            )
        picture = (255 * picture).round().to(torch.uint8)
    return _shrunk(picture)


def _shrunk(picture: UInt8[Tensor, "h w c"]) -> UInt8[Tensor, "height width c"]:
    times = -(-max(picture.shape[:2]) // LONGEST)
    if times == 1:
        return picture
    planes = picture.permute(2, 0, 1).float()[None]
    smaller = torch.nn.functional.avg_pool2d(planes, times, ceil_mode=True)[0]
    return smaller.round().to(torch.uint8).permute(1, 2, 0)


def png(pixels: UInt8[Tensor, "height width channels"]) -> bytes:
    """A PNG file of bytes of grey, or of red, green and blue.

    >>> png(torch.zeros(2, 2, 1, dtype=torch.uint8))[:4]
    b'\\x89PNG'
    """
    height, width, channels = pixels.shape

    def chunk(name: bytes, body: bytes) -> bytes:
        checked = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", checked)

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    # Every row begins with the number of its filter: 0, none.
    rows = torch.nn.functional.pad(pixels.reshape(height, -1), (1, 0))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            chunk(b"IDAT", zlib.compress(to_bytes(rows), 9)),
            chunk(b"IEND", b""),
        ]
    )
