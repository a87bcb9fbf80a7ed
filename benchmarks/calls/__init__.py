"""Calls of attention: how fast they are on a CPU, and what is waited for before a kernel runs."""
