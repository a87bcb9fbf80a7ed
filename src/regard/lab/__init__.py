"""Small experiments that show why attention is as it is, each one readable file.

Each states a claim, tests it with seeds fixed, and says whether what came out supports it:

>>> from regard.lab import scaling
>>> result = scaling.run(widths=(16, 64, 256), steps=0)
>>> f"the variance of q·k grows as d to the {result.numbers['variance_slope']:.1f}"
'the variance of q·k grows as d to the 1.0'

`regard lab` lists them, `regard lab scaling` runs one and writes a picture, a page and its numbers.
"""
