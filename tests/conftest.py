"""Shared set-up: quick, repeatable property tests, and the device that parity is tested on."""

import gc
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from regard.backends.tiled.loop import inner_loop
from tests.fresh_process import FreshProcesses
from tests.parity import cases

# Only laws need it, and a machine with a GPU may be bare.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    for profile, examples in (("regard", 30), ("whole", 200)):
        settings.register_profile(
            profile,
            derandomize=True,
            deadline=None,
            max_examples=examples,
            suppress_health_check=[HealthCheck.too_slow],
        )
torch.set_num_threads(1)
# Little of what tests make waits for the garbage collector, which looks through all that is there.
gc.set_threshold(10_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/parity/test_conformance.py runs")
    parser.addoption("--uncompiled", action="store_true", help="without the compiled inner loop")
    parser.addoption("--whole", action="store_true", help="whole tables and many draws of laws")
    parser.addoption(
        "--share", default="0/1", help="i/n: every n-th test from the i-th on, for n processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    cases.DEVICE, cases.WHOLE = config.getoption("--device"), config.getoption("--whole")
    if find_spec("hypothesis"):
        settings.load_profile("whole" if cases.WHOLE else "regard")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine, n = map(int, config.getoption("--share").split("/"))
    config.hook.pytest_deselected(items=[t for i, t in enumerate(items) if i % n != mine])
    items[:] = items[mine::n]


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end it may: Triton's bindings complain of what is not taken down."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcesses]:
    """Runs programs as if nothing but torch had been imported before."""
    with FreshProcesses() as processes:
        yield processes


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations as the inner loop of tiled, as on a machine without a compiler."""
    monkeypatch.setattr(inner_loop, "found", lambda: (None, "switched off by a test"))


@pytest.fixture(autouse=True)
def _uncompiled_if_asked(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--uncompiled"):
        request.getfixturevalue("uncompiled")


@pytest.fixture(autouse=True)
def _compiled_afresh(request: pytest.FixtureRequest) -> None:
    """What a test compiles does not count towards the compiler's limit in the tests after it."""
    if request.node.get_closest_marker("compiled"):
        torch.compiler.reset()


@pytest.fixture
def by_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without a trained model, as where the weights of this package's are not there."""
    from regard.commands import named_subject

    monkeypatch.setattr(named_subject, "EMBEDDED", Path("nowhere"))


@pytest.fixture(scope="module")
def plain_products() -> Iterator[None]:
    """Without oneDNN where it is Arm's, which takes half a millisecond before it multiplies: five
    times as long as the products of small models. For tests of what models do with them."""
    before = torch._C._get_mkldnn_enabled()
    # PyTorch 2.9 cannot say whose oneDNN is.
    acl = getattr(torch.backends.mkldnn, "is_acl_available", lambda: platform.machine() != "x86_64")
    torch._C._set_mkldnn_enabled(before and not acl())
    yield
    torch._C._set_mkldnn_enabled(before)
