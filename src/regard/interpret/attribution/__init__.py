"""Attribution: what each token and each head did, beyond raw weights."""

from regard.interpret.attribution.attributions import Attribution
from regard.interpret.attribution.circuits import Circuit, TokenPair, circuit
from regard.interpret.attribution.composition import Compositions, compositions
from regard.interpret.attribution.head_matrices import HeadMatrices, head_matrices
from regard.interpret.attribution.logit_parts import LogitPart, LogitParts, direct_logits
from regard.interpret.attribution.methods import METHODS, Method, attribute
from regard.interpret.attribution.model_anatomy import Anatomy, anatomy

__all__ = [
    "METHODS",
    "Anatomy",
    "Attribution",
    "Circuit",
    "Compositions",
    "HeadMatrices",
    "LogitPart",
    "LogitParts",
    "Method",
    "TokenPair",
    "anatomy",
    "attribute",
    "circuit",
    "compositions",
    "direct_logits",
    "head_matrices",
]
