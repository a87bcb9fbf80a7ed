"""Traces, costs and experiments as pictures.

They are drawn with matplotlib, which is an extra: nothing here is imported before it is asked for.
"""
