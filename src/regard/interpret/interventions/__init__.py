"""Interventions: whether what heads do matters."""

from regard.interpret.interventions.ablation import ablate
from regard.interpret.interventions.activations import Activations, Patched
from regard.interpret.interventions.edges import Cut
from regard.interpret.interventions.effects import Effect, Effects
from regard.interpret.interventions.intervention import CallPart, Intervention
from regard.interpret.interventions.knockout import knock_out
from regard.interpret.interventions.outputs import Replaced
from regard.interpret.interventions.patching import patch
from regard.interpret.interventions.runs import intervene

__all__ = [
    "Activations",
    "CallPart",
    "Cut",
    "Effect",
    "Effects",
    "Intervention",
    "Patched",
    "Replaced",
    "ablate",
    "intervene",
    "knock_out",
    "patch",
]
