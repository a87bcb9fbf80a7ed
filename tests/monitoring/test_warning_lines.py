"""The line that a warning of a monitor points at."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

import regard
from tests.watching.test_watch import X


def broken(*_: Any, **__: Any) -> Any:
    raise OSError("no space left")


@pytest.mark.skipif(
    hasattr(regard.Monitor.step, "__wrapped__"), reason="checked calls have more frames"
)
def test_warnings_point_at_the_training_loop() -> None:
    linear = nn.Linear(16, 16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with regard.Monitor(linear, every=1, to=broken) as monitor:
            linear(X)
            monitor.step()
        monitor = regard.Monitor(linear, every=1, to=broken)
        linear(X)
        monitor.step()
        monitor.close()
    assert len(told) == 6
    assert {warning.filename for warning in told} == {__file__}
