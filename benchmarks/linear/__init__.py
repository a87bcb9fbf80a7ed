"""Attention in linear time."""
