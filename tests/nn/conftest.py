import pytest
import torch


@pytest.fixture(autouse=True)
def _same_every_time():
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)
