"""What is said about the peers' tests is itself tested, on a checkout of two tests."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.fresh_process import FreshProcesses
from tests.peers import __main__, checkouts, outcomes, suites
from tests.peers.differences import (
    Difference,
    Expected,
    differences,
    expected,
    outdated,
    unexpected,
)
from tests.peers.outcomes import NoOutcomesError, Outcomes, run
from tests.peers.report import Report

SUM = "test_small.py::test_sum"
MODULE = "test_small.py::test_module"
FEW = "test_small.py::test_causal_variants_shape3"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One test that regard passes as PyTorch does, one that tells them apart, and three that take
    long or compile, of which one has few pairs."""
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

            def test_causal_variants_shape0(): pass
            def test_causal_variants_shape3(): pass
            def test_causal_variants_compile_shape3(): pass
        """)
    )
    # What a whole checkout of PyTorch has beside its tests: not built, it cannot be imported.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not built')")
    return tmp_path


@pytest.fixture
def forked(fresh: FreshProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is not started anew for the tests of a peer: half of the time is torch's."""

    def start(
        command: list[str], *, cwd: Path, env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        _python, minus, module, *words = command
        assert minus == "-m"
        done = fresh(f"""
import os, runpy, sys
os.environ |= {env!r}
os.chdir({str(cwd)!r})
sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *filter(None, sys.path)]
sys.argv = {[module, *words]!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
""")
        return subprocess.CompletedProcess(command, done.code, done.out + done.err)

    monkeypatch.setattr(outcomes.subprocess, "run", start)


def test_a_difference_is_found_and_names_its_reason(
    checkout: Path, request: pytest.FixtureRequest
) -> None:
    suite = next(iter(suites.pytorch(checkout, ["tiled"])))
    (tiled,) = suite.variants
    arguments = [*suite.arguments[:-1], "test_small.py"]
    plain = run(checkout, arguments)
    request.getfixturevalue("forked")
    ours = run(checkout, arguments, tiled.plugins, **tiled.variables)

    assert {test: end.outcome for test, end in plain.tests.items()} == {
        SUM: "passed", MODULE: "passed", FEW: "passed"
    }  # fmt: skip
    assert ours.counts == {"calls": 1}
    (found,) = differences("tiled", plain, ours)
    assert (found.test, found.plain, found.ours) == (MODULE, "passed", "failed")
    assert "regard.nn.dropin" in found.why


@pytest.mark.usefixtures("forked")
def test_a_watch_that_changes_the_output_is_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "test_llama.py").write_text(
        textwrap.dedent("""
            import torch
            from transformers import LlamaConfig, LlamaModel

            def model():
                sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
                return LlamaModel(LlamaConfig(vocab_size=8, num_hidden_layers=2, **sizes)).eval()

            def test_same():
                model()(torch.arange(6)[None])

            def test_other():
                it, calls = model(), []

                def changed(module, args, out):
                    calls.append(out)
                    out.last_hidden_state = out.last_hidden_state + len(calls)

                it.register_forward_hook(changed)
                it(torch.arange(6)[None])
        """)
    )
    found = run(tmp_path, ["test_llama.py"], suites.WATCHED.plugins)

    assert {test.split("::")[1]: end.outcome for test, end in found.tests.items()} == {
        "test_same": "passed", "test_other": "failed"
    }  # fmt: skip
    assert "watched, last_hidden_state is another" in found.tests["test_llama.py::test_other"].why
    assert found.counts == {"traces": 4, "outputs": 1}


@pytest.mark.usefixtures("forked")
def test_every_sdpa_is_regard_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "test_llama.py").write_text(
        textwrap.dedent("""
            import torch
            from transformers import LlamaConfig, LlamaModel

            def test_names():
                sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
                config = LlamaConfig(vocab_size=8, num_hidden_layers=2, **sizes)
                model = LlamaModel(config).eval()
                assert model.config._attn_implementation == "regard"
                named = model(torch.arange(6)[None]).last_hidden_state
                model.set_attn_implementation("eager")
                assert model.config._attn_implementation == "eager"
                eager = model(torch.arange(6)[None]).last_hidden_state
                torch.testing.assert_close(named, eager)
                model.set_attn_implementation("sdpa")
                assert model.config._attn_implementation == "regard"
        """)
    )
    found = run(tmp_path, ["test_llama.py"], suites.BY_NAME.plugins)

    assert [end.outcome for end in found.tests.values()] == ["passed"], found.tests
    # Two layers once: eager attention is not counted.
    assert found.counts == {"calls": 2}


@pytest.mark.usefixtures("forked")
def test_what_does_not_run_is_told(checkout: Path) -> None:
    with pytest.raises(
        NoOutcomesError, match=r"test_absent\.py in .* did not run:[\s\S]*not found"
    ):
        run(checkout, ["test_absent.py"])


@pytest.mark.usefixtures("forked")
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

    assert ran == {"TestFew": 90, "TestMany": 17}


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


def test_without_a_network_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = (tmp_path / "absent").as_uri()
    peer = checkouts.Peer("small", "torch", absent, ("test",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    with pytest.raises(SystemExit) as error:
        peer.checkout()

    for words in (
        f"the tests of small {peer.tag} could not be cloned",
        "git said: fatal: ",
        f"git clone --depth=1 --branch={peer.tag} {absent}",
        "make peers SMALL=",
    ):
        assert words in str(error.value)
    assert not list(checkouts.cache().iterdir())


@pytest.mark.parametrize(
    ("peer", "file", "text"),
    [
        (checkouts.TRANSFORMERS, "src/transformers/__init__.py", '__version__ = "1.2.3"\n'),
        (checkouts.PYTORCH, "version.txt", "1.2.3\n"),
    ],
    ids=["transformers", "pytorch"],
)
def test_the_version_of_a_checkout(
    peer: checkouts.Peer, file: str, text: str, tmp_path: Path
) -> None:
    assert peer.version(tmp_path) == "unknown"
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert peer.version(tmp_path) == "1.2.3"


def test_two_dozen_families() -> None:
    assert len(set(suites.FAMILIES)) == 24


@pytest.mark.parametrize(
    ("watched", "code", "said"),
    [
        ({"a": "passed", "b": "skipped"}, 0, "0 differences: 0 expected, 0 unexpected"),
        ({"a": "failed", "b": "skipped"}, 1, "1 differences: 0 expected, 1 unexpected"),
        ({"b": "skipped"}, 1, "1 differences: 0 expected, 1 unexpected"),
        ({}, 1, "did not run: bert"),
    ],
    ids=["same", "fails", "is not there", "does not run"],
)
def test_the_end_says_what_ran_and_the_unexpected_fails(
    watched: dict[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def found(checkout: Path, arguments: list[str], plugins: tuple[str, ...] = ()) -> Outcomes:
        if plugins and not watched and "bert" in arguments[0]:
            raise NoOutcomesError("no module named so")
        of_bert = plugins and watched and "bert" in arguments[0]
        outcomes = _outcomes(**watched) if of_bert else _outcomes(a="passed", b="skipped")
        outcomes.counts = {"traces": 1234} if plugins else {}
        return outcomes

    for folder in checkouts.TRANSFORMERS.folders:
        (tmp_path / folder).mkdir()
    results = tmp_path / "results.md"
    words = ["transformers", "--transformers", str(tmp_path), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["peers", *words, "--families", "gpt2", "bert",
                                      "--variants", "watched"])  # fmt: skip
    monkeypatch.setattr(__main__, "run", found)

    assert __main__.main() == code
    printed = capsys.readouterr().out
    assert said in printed
    assert "as is: 2 suites; 2 passed, 0 failed, 2 skipped" in printed
    assert f"watched: {2 if watched else 1} families; " in printed
    for line in (said, "| gpt2 | watched | 1 | 0 | 1 |  | 1,234 traces |", "- tests of tra"):
        assert line in results.read_text("utf-8")


def test_expected_differences_are_counted_by_their_reason() -> None:
    known = [Expected("watched", "a*", "because"), Expected("*", "b", "because of b")]
    report = Report(known)
    plain, ours = _outcomes(a1="passed", a2="passed"), _outcomes(a1="failed", a2="failed")
    report.add("some", "as is", plain)
    report.add("some", "watched", ours, differences("watched", plain, ours))

    assert list(report.reasons()) == [(2, "because")]
    assert report.sums()[-1] == "2 differences: 2 expected, 0 unexpected"
    assert not report.fails
    report.add("other", "as is", _outcomes(b="passed"))
    assert not report.fails
    report.add("other", "watched", _outcomes(b="passed"))
    assert report.fails
    assert "expected, but the same now: *  b" in report.sums()


def _outcomes(**ends: str) -> Outcomes:
    made = Outcomes()
    for test, end in ends.items():
        made.note(f'{{"test": "{test}", "outcome": "{end}", "why": ""}}')
    return made
