"""What a model says comes next, and what it would say if parts of it were switched off."""

from regard.view.predictions.continuation import Written, continued
from regard.view.predictions.contributions import contributions
from regard.view.predictions.prediction import TOP, prediction
from regard.view.predictions.predictor import Predictor, predictor_of
from regard.view.predictions.switches import MOST_SWITCHES, Switch, interventions, switches

__all__ = [
    "MOST_SWITCHES",
    "TOP",
    "Predictor",
    "Switch",
    "Written",
    "continued",
    "contributions",
    "interventions",
    "prediction",
    "predictor_of",
    "switches",
]
