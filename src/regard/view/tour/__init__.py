"""The tour: how one weight comes about, in five steps with the numbers of this text."""

from regard.view.tour.pair_numbers import PairNumbers, pair_numbers
from regard.view.tour.shown_pair import shown_pair
from regard.view.tour.steps import tour

__all__ = ["PairNumbers", "pair_numbers", "shown_pair", "tour"]
