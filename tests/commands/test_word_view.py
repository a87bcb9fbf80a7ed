"""`regard view` of words compared by their spelling: what it prints, how it fails."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from regard import cli

pytestmark = pytest.mark.usefixtures("by_spelling")
runner = CliRunner()


@pytest.fixture(autouse=True)
def _console(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")


def output(*args: str, stdin: str | None = None) -> str:
    result = runner.invoke(cli.app, list(args), input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_view_says_what_it_shows() -> None:
    first, second = output("view").splitlines()[:2]
    assert first == "14 words compared by their spelling; no trained model"
    assert second == "mask=~window(0), score=scaled_dot() / 6, backend=tiled"


def test_related_words_find_each_other() -> None:
    lines = output("view").splitlines()
    strongest = {line.split()[0]: line.split()[-2] for line in lines if line.endswith("%")}
    assert strongest["attends"] == "attention"
    assert strongest["attention"] == "attends"
    assert strongest["word"] == "words"
    assert strongest["reread"] == "read"
    assert strongest["like"] == "alike"


def test_view_of_two_words_is_exactly_this() -> None:
    # They share one trigram of two and of three, so their cosine is 1/√6 and their logits differ
    # by 32/6 · (1 - 1/√6) = 3.156: weights 0.041 and 0.959, entropy 0.17, received 1.041 of 2.
    text = output("view", "be", "bet", "--mask", "causal", "--token", "bet")
    assert [line.rstrip() for line in text.splitlines()] == [
        "2 words compared by their spelling; no trained model",
        "mask=causal(), score=scaled_dot() / 6, backend=tiled",
        "",
        "             b",
        "          b  e",
        "          e  t   entropy  strongest",
        "be       100        0.00  be       100%",
        "bet        4 96     0.17  bet       96%",
        "",
        "received  52 48",
        "",
        "rows look at columns; percent (. below 0.5); blank: masked",
        "entropy in nats (all alike: 0.69); received: share of all weight (most: 52%)",
        "",
        "what 'bet' (word 2) looks at, in percent",
        "  be  bet",
        "  4    96",
        "",
        "who looks at 'bet' (word 2), in percent of what each gives",
        "  be  bet",
        "       96",
    ]


def test_view_is_the_same_every_time() -> None:
    assert output("view") == output("view")


def test_view_takes_quoted_and_loose_words_and_standard_input() -> None:
    quoted = output("view", "the reader reads")
    assert output("view", "the", "reader", "reads") == quoted
    assert output("view", "-", stdin="the reader\nreads\n") == quoted


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("causal", "mask=causal(),"),
        ("full", "mask=None,"),
        ("window:2", "mask=window(2),"),
        ("causal,others", "mask=causal() & ~window(0),"),
        ("full, window:1", "mask=window(1),"),
    ],
)
def test_masks(given: str, shown: str) -> None:
    assert shown in output("view", "--mask", given)


def shares(*args: str) -> list[float]:
    """The strongest weight of each row."""
    return [int(s) / 100 for s in re.findall(r"\d\.\d\d .* (\d+)%", output("view", *args))]


def test_scores_differ_as_they_should() -> None:
    scaled, dot, cosine = (
        shares("word words wordy", "--mask", "full", "--score", score)
        for score in ("scaled_dot", "dot", "cosine")
    )
    assert dot == [1.0, 1.0, 1.0]
    assert all(0.5 < share < 1 for share in scaled)
    assert all(share < 0.4 for share in cosine)


def test_temperature_sharpens() -> None:
    text = "reads read reread"
    cool, warm = (shares(text, "--temperature", t) for t in ("2", "20"))
    assert len(cool) == len(warm) == 3
    assert all(a > b for a, b in zip(cool, warm, strict=True))


def test_token_chooses_the_word_to_read_with() -> None:
    text = "read and READ again"
    assert "what 'READ' (word 3) looks at" in output("view", text, "--token", "read")
    assert "what 'and' (word 2) looks at" in output("view", text, "--token", "2")
    assert "what 'read' (word 1) looks at" in output("view", text)
    assert "what '3' (word 1) looks at" in output("view", "3 two one", "--token", "3")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            [""],
            "regard: there is no word in the text\n  got:      ''\n  accepted: at least one word",
        ),
        (["?!"], "regard: there is no word in the text"),
        (["a", "--mask", "casual"], "regard: unknown mask\n  got:      'casual'"),
        (["a", "--mask", "window:x"], "got:      'window:x'"),
        (["a", "--mask", "causal:3"], "got:      'causal:3'"),
        (["a", "--score", "vibes"], "regard: unknown score\n  got:      'vibes'"),
        (["a", "--temperature", "0"], "regard: temperature divides the scores\n  got:      0"),
        (["a", "--temperature", "nan"], "regard: temperature divides the scores\n  got:      nan"),
        (["a b", "--token", "c"], "regard: --token is not in the text\n  got:      'c'"),
        (["a b", "--token", "3"], "a word of the text, or a number from 1 to 2"),
        (["a b", "--token", ""], "got:      ''"),
        (["a", "--score", "\x1b[31m"], "got:      '\\x1b[31m'"),
    ],
)
def test_errors_explain_and_exit_with_2(args: list[str], says: str) -> None:
    result = runner.invoke(cli.app, ["view", *args])
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    assert result.stdout == ""


def test_escapes_in_the_text_do_not_reach_the_terminal() -> None:
    text = output("view", "a\x1b[31mb c\x07d [red]e[/red]f")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "a\\x1b[31mb" in text
    assert "red]e[/red]f" in text


def test_colour_appears_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in output("view")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "\x1b[" in output("view")
    assert "\x1b" not in output("view", "--plain")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in output("view")


def test_narrow_terminals_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, output("view").splitlines())) <= 40
