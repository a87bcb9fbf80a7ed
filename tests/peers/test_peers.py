"""What is said about the peers' tests is itself tested, on a checkout of two tests."""

from __future__ import annotations

import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.peers import checkouts, suites
from tests.peers.differences import (
    Difference,
    Expected,
    differences,
    expected,
    outdated,
    unexpected,
)
from tests.peers.outcomes import Outcomes, run

SUM = "test_small.py::test_sum"
MODULE = "test_small.py::test_module"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One test that regard passes as PyTorch does, and one that tells them apart."""
    (tmp_path / "test_small.py").write_text(
        textwrap.dedent("""
            import torch
            from torch.nn import MultiheadAttention
            from torch.nn.functional import scaled_dot_product_attention

            def test_sum():
                q, k, v = torch.randn(3, 1, 2, 4, 8)
                out = scaled_dot_product_attention(q, k, v)
                torch.testing.assert_close(out, (q @ k.mT / 8**0.5).softmax(-1) @ v)

            def test_module():
                assert MultiheadAttention.__module__ == "torch.nn.modules.activation"
        """)
    )
    return tmp_path


def test_a_difference_is_found_and_names_its_reason(checkout: Path) -> None:
    variants = next(iter(suites.pytorch(checkout, ["tiled"]))).variants
    (tiled,) = variants
    plain = run(checkout, ["test_small.py"])
    ours = run(checkout, ["test_small.py"], tiled.plugins, **tiled.variables)

    assert {test: end.outcome for test, end in plain.tests.items()} == {
        SUM: "passed", MODULE: "passed"
    }  # fmt: skip
    assert ours.counts == {"calls": 1}
    (found,) = differences("tiled", plain, ours)
    assert (found.test, found.plain, found.ours) == (MODULE, "passed", "failed")
    assert "regard.nn.dropin" in found.why


def test_what_does_not_run_is_told(checkout: Path) -> None:
    with pytest.raises(SystemExit, match="did not run"):
        run(checkout, ["test_absent.py"])


def test_many_cases_of_one_test_are_thinned_after_the_choice(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(
        textwrap.dedent("""
            import pytest

            def cases(long, short):
                names = [f"{n}_long" for n in range(long)] + [f"{n}_short" for n in range(short)]
                return pytest.mark.parametrize("case", names)

            class TestFew:
                @cases(long=30, short=90)
                def test_it(self, case): pass

            class TestMany:
                @cases(long=0, short=180)
                def test_it(self, case): pass
        """)
    )
    ran = Counter(test.split("::")[1] for test in run(tmp_path, ["-k", "short"]).tests)

    assert ran == {"TestFew": 90, "TestMany": 180 // 41 + 1}


def test_a_test_that_only_one_run_has_differs() -> None:
    plain, ours = _outcomes(a="passed", b="passed"), _outcomes(a="passed")
    assert differences("watched", plain, ours) == [
        Difference("watched", "b", "passed", "did not run")
    ]


def test_the_worst_report_of_a_test_counts() -> None:
    found = _outcomes(a="failed")
    found.note('{"test": "a", "outcome": "passed", "why": ""}')
    assert found.tests["a"].outcome == "failed"


def test_what_is_expected_must_differ() -> None:
    known = [Expected("watched", "*::test_a*", "because"), Expected("tiled", "*", "because")]
    new, old = Difference("watched", "x::test_b", "passed", "failed"), ("watched", "x::test_a1")

    assert unexpected([new], known) == [new]
    assert unexpected([Difference(*old, "passed", "failed")], known) == []
    # Nothing of tiled's ran: nothing is said about it.
    assert outdated([new], [old, ("watched", "x::test_b")], known) == [known[0]]
    assert outdated([Difference(*old, "passed", "failed")], [old], known) == []


def test_every_expected_difference_has_a_reason() -> None:
    known = expected()
    assert all(entry.reason.strip() for entry in known)
    assert len({entry.reason for entry in known}) <= 20


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of pytorch: no test/"):
        checkouts.PYTORCH.checkout(tmp_path)


def test_tests_are_cloned_once_at_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    peer = checkouts.Peer("small", "torch", theirs.as_uri(), ("test",))
    for folder in ("test", "docs"):
        (theirs / folder).mkdir(parents=True)
        (theirs / folder / "file").touch()
    by = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), (*by, "commit", "-qm", "a"), ("tag", peer.tag)):
        subprocess.run(["git", "-C", str(theirs), *command], check=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interrupted = checkouts.cache() / f"small-{peer.tag}.part"
    interrupted.mkdir(parents=True)

    cloned = peer.checkout()

    assert cloned.is_relative_to(tmp_path / "cache")
    assert (cloned / "test" / "file").exists()
    assert not (cloned / "docs").exists()
    assert not interrupted.exists()
    (theirs / "test").rename(theirs / "gone")
    assert peer.checkout() == cloned


def test_twenty_families() -> None:
    assert len(set(suites.FAMILIES)) == 20


def _outcomes(**ends: str) -> Outcomes:
    made = Outcomes()
    for test, end in ends.items():
        made.note(f'{{"test": "{test}", "outcome": "{end}", "why": ""}}')
    return made
