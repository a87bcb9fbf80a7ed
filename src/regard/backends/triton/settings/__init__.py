"""Which tile sizes, warps and pipeline depths a call runs with, on which card."""
