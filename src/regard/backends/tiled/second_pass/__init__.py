"""Questions about the weights, and their gradients: one more pass over q and k, tile by tile."""

from regard.backends.tiled.second_pass.block_mass import BlockMass, ChosenBlocks, KeyBlocks
from regard.backends.tiled.second_pass.question_gradients import Learned, QuestionGradients
from regard.backends.tiled.second_pass.tiled_pass import TiledPass, cuts

__all__ = [
    "BlockMass",
    "ChosenBlocks",
    "KeyBlocks",
    "Learned",
    "QuestionGradients",
    "TiledPass",
    "cuts",
]
