"""Shared set-up: quick, repeatable property tests."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "regard",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("regard")
torch.set_num_threads(1)
