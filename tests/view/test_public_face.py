"""`regard.view` as people find it: its functions, and its files without an import of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from regard import view
from tests.fresh_process import FreshProcesses

Run = Callable[[str], str]


@pytest.fixture
def run(fresh: FreshProcesses) -> Run:
    def said(program: str) -> str:
        done = fresh(program)
        assert done.code == 0, done.err
        return done.out.strip()

    return said


def test_pictures_are_there_without_an_import_of_their_own(run: Run) -> None:
    pytest.importorskip("matplotlib")
    program = (
        "import sys; from regard import view; assert 'matplotlib' not in sys.modules; "
        "print(view.picture.heat_map.__module__, view.cost_plot.cost_plot.__name__)"
    )
    assert run(program) == "regard.view.pictures.trace_pictures cost_plot"


def test_the_view_is_there_without_an_import_of_its_own(run: Run) -> None:
    program = (
        "import sys, regard; assert 'regard.view' not in sys.modules; "
        "print(regard.view.page.__name__, 'view' in dir(regard))"
    )
    assert run(program) == "page True"


def test_functions_stay_functions_when_their_files_are_imported(run: Run) -> None:
    program = (
        "import regard.view.web.html_page, regard.view.web.notebook_widget\n"
        "from regard import view\n"
        "print(callable(view.page), callable(view.widget))"
    )
    assert run(program) == "True True"


def test_dir_lists_what_there_is() -> None:
    for name in ("page", "widget", "serve", "App", "heat_map", "picture", "cost_plot"):
        assert name in dir(view)
        assert getattr(view, name) is not None
    with pytest.raises(AttributeError, match=r"module 'regard\.view' has no attribute 'vibes'"):
        _ = view.vibes  # type: ignore[attr-defined]


def test_without_matplotlib_the_extra_is_named(run: Run) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import regard; from regard import view\n"
        "dir(view)\n"
        "for name in ('picture', 'cost_plot', 'lab_picture'):\n"
        "    try: getattr(view, name)\n"
        "    except regard.RegardError as error: print(error)"
    )
    said = run(program)
    assert said.count("pictures are drawn with matplotlib, which is not installed") == 3
    assert said.count("do:       pip install 'regard[picture]'") == 3
