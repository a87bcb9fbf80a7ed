import pytest
import torch


@pytest.fixture(autouse=True)
def _same_every_time(request):
    """What a test draws and compiles does not depend on the tests before it."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("compiled"):
        torch.compiler.reset()
