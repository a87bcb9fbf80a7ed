"""What several runs of the scaling experiment are told as."""

from __future__ import annotations

from regard.lab.reports.scaling import reached


def test_runs_of_several_seeds_are_told_as_ranges() -> None:
    runs = [{"learned_at": n, "accuracy": 1.0} for n in (55, 52)]
    assert reached(runs, 300) == "90% right after 52 to 55 steps"
    runs[1] = {"learned_at": None, "accuracy": 0.333}
    assert reached(runs, 300) == "33 to 100% right after 300 steps"
