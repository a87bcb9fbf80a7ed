"""Models by name: loaded without running anybody's code, and watched while they read a text."""

from regard.models.card import Card
from regard.models.causal import CausalConfig, CausalModel
from regard.models.named_models import NAMES, load
from regard.models.readers import HuggingFaceReader, OwnReader, OwnTranslator, Reader
from regard.models.tokenizer import Tokenizer
from regard.models.translator import TranslatorConfig, TranslatorModel

__all__ = [
    "NAMES",
    "Card",
    "CausalConfig",
    "CausalModel",
    "HuggingFaceReader",
    "OwnReader",
    "OwnTranslator",
    "Reader",
    "Tokenizer",
    "TranslatorConfig",
    "TranslatorModel",
    "load",
]
