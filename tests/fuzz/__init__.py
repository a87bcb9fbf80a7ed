"""Hostile input, drawn by chance from a seed: files, folders and words that are nearly right.

Each file beside this one that has a `target` is a kind of input. A case is right if it ends in a
`RegardError` or in right data, in bounded time and memory; anything else is a finding.
"""
