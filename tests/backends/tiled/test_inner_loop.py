"""The compiled inner loop: how it is built, kept and trusted, and what happens without it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, scores
from regard.backends.tiled import fused, pieces
from regard.backends.tiled.fused import fusing
from regard.backends.tiled.loop import AGAIN, inner_loop, library
from regard.backends.tiled.loop.compiled import Loop
from regard.inputs import check
from tests.fresh_process import FreshProcesses

look: Callable[[], tuple[Loop | None, str]] = inner_loop.found.__wrapped__
"""Looks for the loop as a fresh process would."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the compiler that is found without being named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "regard"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Names a shell script as the compiler."""

    def name(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return name


def changed(
    name: str, right: str, wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources with one place of a file changed."""
    shutil.copytree(library.SOURCES, folder / "loop")
    path = folder / "loop" / name
    source = path.read_text()
    assert right in source
    path.write_text(source.replace(right, wrong, 1))
    monkeypatch.setattr(library, "SOURCES", folder / "loop")


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.usefixtures("quickly")
def test_it_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look()[0] is not None
    (name,) = kept(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("built a second time")

    monkeypatch.setattr(subprocess, "run", never)
    assert look()[0] is not None
    assert kept(cache) == [name]


def optimised(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than it is for use, which takes most of the time."""
    flags = (level if flag == "-O3" else flag for flag in library.FLAGS)
    monkeypatch.setattr(library, "FLAGS", tuple(flags))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is built as it is written, which takes a third of the time."""
    optimised("-O0", monkeypatch)


SYSTEM = """
#ifdef __aarch64__
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif
"""
"""What most of the time of building the loop as it is written goes into, and no test changes."""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    (folder / "system.h").write_text(SYSTEM)
    return folder


@pytest.fixture
def by_parts(cache: Path, objects: Path, compiler: Callable[[str], None]) -> None:
    """A compiler that reads the system's headers once, and builds again only the files that are
    others than before, or whose headers are."""
    compiler(f"""
        for word; do
            case $word in
                *.c) sources="$sources $word" ;;
                -shared | -lm | -o) ;;
                -*) flags="$flags $word" ;;
                *) library=$word ;;
            esac
        done
        system={objects}/system.h
        [ -e $system.gch ] || cc $flags $system -o $system.gch || exit 1
        for source in $sources; do
            object={objects}/$(cat $source ${{source%/*}}/*.h | sha256sum | cut -c1-32).o
            [ -e $object ] || cc $flags -include $system -c $source -o $object || exit 1
            parts="$parts $object"
        done
        cc -shared -o $library $parts -lm
    """)


@pytest.fixture(scope="module")
def built() -> Path:
    """The library that other tests use."""
    return Path(library.library()._name)


@pytest.fixture
def copying(built: Path, cache: Path, compiler: Callable[[str], None]) -> None:
    """A compiler that copies the library: how libraries are kept does not depend on what is in
    them."""
    compiler(f'while [ "$1" != -o ]; do shift; done; sleep 0.2; cat "{built}" > "$2"')


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("change", ["tile.c", "call.h", "options"])
def test_it_is_built_anew_when_anything_changes(
    change: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look()[0] is not None
    if change == "options":
        monkeypatch.setenv("CC", f"{os.environ['CC']} -g")
    else:
        changed(change, "#include", "/* changed */\n#include", tmp_path, monkeypatch)
    assert look()[0] is not None
    assert len(kept(cache)) == 2


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("damage", [b"", b"nonsense", None], ids=["empty", "nonsense", "truncated"])
def test_a_damaged_library_is_not_loaded(damage: bytes | None, cache: Path) -> None:
    assert look()[0] is not None
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.unlink()  # This process has it loaded; others must not see it change.
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert look()[0] is not None
    assert [p.read_bytes() for p in cache.iterdir()] == [whole]


@pytest.mark.usefixtures("copying")
def test_processes_that_build_at_once(cache: Path, fresh: FreshProcesses) -> None:
    program = f"""
import os
os.environ |= { ({name: os.environ[name] for name in ("CC", "XDG_CACHE_HOME")}) }
from regard.backends.tiled.loop.inner_loop import found

def child():
    number = os.fork()
    if not number:
        os._exit(0 if found()[0] is not None else 1)
    return number

print([os.waitpid(number, 0)[1] for number in [child() for _ in range(3)]])
"""
    assert fresh(program).out.strip() == "[0, 0, 0]"
    assert len(kept(cache)) == 1


def test_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look() == (None, "no C compiler was found")
    monkeypatch.setenv("CC", "nowhere/cc -O1")
    assert look() == (None, "the C compiler CC=nowhere/cc -O1 was not found")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'tile.c:1: no such thing' >&2; echo more >&2; exit 1", "tile.c:1: no such thing"),
        ("exit 3", "exit status 3"),
    ],
)
def test_a_compiler_that_fails(
    script: str, reason: str, cache: Path, compiler: Callable[[str], None]
) -> None:
    compiler(script)
    loop, why_not = look()
    assert loop is None
    assert why_not == f"the C compiler {os.environ['CC']} failed: {reason}"
    assert kept(cache) == []


def test_a_compiler_that_builds_nonsense(cache: Path, compiler: Callable[[str], None]) -> None:
    compiler('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    loop, why_not = look()
    assert loop is None
    assert why_not.startswith("the compiled library cannot be loaded: ")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("command", [" ", "\t", ""])
def test_a_compiler_without_a_name_is_the_usual_one(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_built", lambda *_: Path("nowhere"))
    monkeypatch.setenv("CC", command)
    assert look()[1].startswith("the compiled library cannot be loaded")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("command", ['cc "', "cc '-O1", "cc \\"])
def test_a_compiler_whose_name_is_torn(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    assert look() == (None, f"CC={command} cannot be read: {look()[1].partition('read: ')[2]}")


@pytest.mark.parametrize("base", ["relative", "~nobody-at-all/x", "", "/proc/self/none", "\udcff"])
def test_strange_cache_folders_are_no_error(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setattr(library, "_built", lambda *_: Path("nowhere"))
    loop, why_not = look()
    assert loop is None
    assert why_not
    # A path that is not absolute does not count, and makes nothing here.
    assert os.listdir(tmp_path) in ([], ["home"])


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    assert look() == (None, "there is no home folder to keep it in")


def test_an_unknown_cpu_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> list[str]:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(library, "_cpu", unknown)
    assert look() == (None, "what it depends on is not known: /proc/cpuinfo")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_what_is_no_file_in_the_cache_is_passed_over(
    kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(library, "_key", lambda _: "key")
    monkeypatch.setattr(library, "_built", lambda *_: Path("nowhere"))
    path = cache / "tile-key-0.so"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[
        kind
    ]()
    assert look()[1].startswith("the compiled library cannot be loaded")


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_thinks_nan_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    optimised("-O1", monkeypatch)
    monkeypatch.setenv("CC", "cc -ffinite-math-only")
    assert look() == (None, "the compiled one gives wrong results here")


LARGER = "larger(floats s, floats most)\n{\n"


@pytest.mark.usefixtures("by_parts", "quickly")
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        pytest.param("tile.c", "#include", "#include", id="nothing"),
        ("tile.h", "1.666652113e-1f", "1.68e-1f"),
        ("tile.h", LARGER, LARGER + "return either(s > most, s, most);\n"),
        ("tile.h", "? value : s[k]", "? s[k] : value"),
        ("tile.h", "* moved) * shrink", "* moved)"),
        ("call.h", "+ d] * factor", "+ d]"),
        ("call.h", "r->start + j % r->span, first", "r->start + j, first"),
        ("call.h", "query + c->low", "query + c->low + 1"),
        ("call.h", "query + c->high + 1", "query + c->high"),
        ("forward.c", " - own;", ";"),
        ("forward.c", "all - all == 0", "1"),
        ("forward.c", "f.entropy = known->entropy", "f.entropy = known->lse"),
        ("forward.c", "return !c->harmed", "return 1"),
        ("forward.c", "(shift - lse) + log_total", "log_total"),
        ("backward.c", "pull + f->shift", "pull"),
        ("backward.c", "f->heat * either", "either"),
        ("backward.c", "&c->scale, k", "&one, k"),
        ("backward.c", "memset(dq", "memset(s"),
        ("backward.c", ": -product_of(g", ": product_of(g"),
        ("backward.c", "if (w->fresh)", "if (0)"),
        ("backward.c", "return !w.of.harmed", "return 1"),
    ],
)
def test_wrong_results_are_found_out(
    name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(name, right, wrong, tmp_path, monkeypatch)
    loop, why_not = look()
    if right == wrong:
        assert loop is not None
    else:
        assert (loop, why_not) == (None, "the compiled one gives wrong results here")


def test_cache_folders_that_will_not_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert look() == (None, f"others can write to the cache folder {cache}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    reason = f"the cache folder {tmp_path / 'file' / 'regard'} cannot be made: Not a directory"
    assert look() == (None, reason)


def test_a_cache_folder_that_cannot_be_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(library.tempfile, "mkstemp", refuse)
    assert look() == (None, f"the cache folder {cache} cannot be written: Permission denied")


def test_only_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert look() == (None, "the compiled one is built on Linux only")


X = torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))


def test_plans_say_which_loop_runs() -> None:
    plan = regard.plan(X, X, X, statistics=True)
    assert plan.inner_loop == "compiled for this CPU, products and all"
    assert "\n  inner loop      compiled for this CPU, products and all\n" in str(plan)
    plan = regard.plan(X, X, X, dropout=0.1, training=True)
    assert plan.inner_loop == "compiled for this CPU, between PyTorch products"
    plan = regard.plan(X.double(), X.double(), X.double(), statistics=True)
    assert plan.inner_loop == "PyTorch operations (the compiled one is for float32 on the CPU)"
    assert regard.plan(X, X, X).inner_loop == ""
    assert "inner loop" not in str(regard.plan(X, X, X))


@pytest.mark.usefixtures("uncompiled")
def test_plans_say_why_it_does_not_run() -> None:
    plan = regard.plan(X, X, X, statistics=True)
    assert plan.inner_loop == "PyTorch operations (switched off by a test)"


def numbers(*axes: int, seed: int = 0) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(seed))


def rows(tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    t = regard.trace(*tensors, backend="tiled", **options)
    return {name: getattr(t, name) for name in ("out", "lse", "max_logit", "entropy")}


def fuses(tensors: list[Tensor], **options: Any) -> bool:
    nothing = dict.fromkeys(("mask", "score", "bias", "softcap", "sink", "scale"))
    nothing |= {"dropout": 0.0, "training": False}
    inputs = check(*tensors, **(nothing | options))
    return fusing(inputs) is not None


def multiplies(dtype: torch.dtype) -> bool:
    """Whether matrices of a type are multiplied as they are."""
    loop, _ = inner_loop.found()
    return loop is not None and (dtype in loop.multiply_packed or dtype in loop.multiply_halves)


def spoiled(t: Tensor, value: float, *place: int) -> Tensor:
    t = t.clone()
    t[place] = value
    return t


NAN, INF = float("nan"), float("inf")
Q, K, V = numbers(2, 4, 150, 12), numbers(2, 2, 700, 12, seed=1), numbers(2, 2, 700, 9, seed=2)
KEEP = numbers(2, 4, 150, 700, seed=3) > 1
KEEP[:, :, 7] = False
CALLS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "plain": ([Q, K, V], {}),
    "scale": ([Q, K, V], {"scale": -3.0}),
    "causal": ([Q, K, V], {"mask": masks.causal()}),
    "from-the-start": ([Q, K, V], {"mask": masks.causal(offset=0)}),
    "window": ([Q, K, V], {"mask": masks.window(40, 9)}),
    "most-rows-see-nothing": (
        [Q.repeat(1, 1, 2, 1), K[:, :, :60], V[:, :, :60]], {"mask": masks.causal()},
    ),
    "padding": ([Q, K, V], {"mask": masks.padding([0, 500])}),
    "keep": ([Q, K, V], {"mask": masks.keep(KEEP)}),
    "sink": ([Q, K, V], {"mask": masks.keep(KEEP), "sink": numbers(4, seed=4)}),
    "large": ([300 * Q, 300 * K, V], {"mask": masks.causal()}),
    "nan-in-q": ([spoiled(Q, NAN, 0, 1, 140, 3), K, V], {"mask": masks.causal()}),
    "nan-in-k": ([Q, spoiled(K, NAN, 0, 1, 600, 3), V], {"mask": masks.causal()}),
    "nan-in-v": ([Q, K, spoiled(V, NAN, 0, 1, 600, 3)], {"mask": masks.causal()}),
    "nan-everywhere-seen": ([Q, K, spoiled(V, NAN, 0, 1, 600, 3)], {}),
    "inf-in-q": ([spoiled(Q, INF, 0, 1, 140, 3), K, V], {}),
    "inf-in-k": ([Q, spoiled(K, -INF, 0, 1, 600, 3), V], {"mask": masks.causal()}),
    "inf-in-v": ([Q, K, spoiled(V, INF, 0, 1, 600, 3)], {"mask": masks.causal()}),
    "heads-last": ([t.mT.contiguous().mT for t in (Q, K, V)], {"mask": masks.causal()}),
    "rows-of-tokens": (
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (Q, K, V)],
        {"mask": masks.causal()},
    ),
    "every-other": ([Q[..., ::2], K[..., ::2], V[..., ::2]], {}),
    "one-key-for-all": ([Q, K[:, :, :1].expand(-1, -1, 700, -1), V], {}),
    "one-head-for-all": ([Q, K[:, :1].expand(-1, 2, -1, -1), V], {}),
    "half": ([t.half() for t in (Q, K, V)], {"mask": masks.causal()}),
    "few-queries": ([Q[:, :, :20], K, V], {"mask": masks.window(90, 3)}),
    "few-queries-keep": ([Q[:, :, :20], K, V], {"mask": masks.keep(KEEP[:, :, :20])}),
    "one-query": ([Q[:, :, :1], K, V], {"mask": masks.causal()}),
    "tiny": ([Q[:1, :1, :4, :8], K[:1, :1, :4, :8], V[:1, :1, :4, :8]], {}),
    "narrow": ([Q[..., :1], K[..., :1], V[..., :1]], {"mask": masks.causal()}),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_both_loops_agree(call: str, request: pytest.FixtureRequest) -> None:
    tensors, options = CALLS[call]
    assert fuses(tensors, **options)
    compiled, narrow = rows(tensors, **options), multiplies(tensors[0].dtype)
    request.getfixturevalue("uncompiled")
    assert not fuses(tensors, **options)
    for name, expected in rows(tensors, **options).items():
        # Logits near 10^6 are rounded to about 0.06; one pass differs from another by that.
        loose = {"rtol": 1e-5, "atol": 0.1} if call == "large" and name != "out" else {}
        if name == "out" and narrow:
            # Weights are rounded before narrow matrices are multiplied.
            step = torch.finfo(expected.dtype).eps
            loose = {"rtol": step, "atol": step * float(expected.abs().max())}
        torch.testing.assert_close(compiled[name], expected, equal_nan=True, **loose)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


SHARED = ["plain", "causal", "keep", "sink", "few-queries"]


@pytest.mark.parametrize("call", SHARED)
def test_many_small_lots_and_many_threads(
    call: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the work is shared out changes nothing, not even rounding."""
    tensors, options = CALLS[call]
    expected = rows(tensors, **options)
    monkeypatch.setattr(pieces, "HELD", 0)
    monkeypatch.setattr(pieces, "LOT", 1)
    for n in (1, 2, 5):
        threads(n)
        got = rows(tensors, **options)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def gradients(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Of everything a loss can reach: out, lse and entropy."""
    sink = options.get("sink")
    learned = [t.detach().requires_grad_() for t in (*tensors, *([] if sink is None else [sink]))]
    if sink is not None:
        options = options | {"sink": learned[3]}
    t = regard.trace(*learned[:3], backend="tiled", **options)
    parts = [part.masked_fill(part.isinf(), 0.0) for part in (t.out, t.lse, t.entropy)]
    loss = sum((part.float() * numbers(*part.shape, seed=9)).sum() for part in parts)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, learned))


@pytest.mark.parametrize("call", [c for c in CALLS if "nan" not in c and "inf" not in c])
def test_both_loops_give_the_same_gradients(call: str, request: pytest.FixtureRequest) -> None:
    tensors, options = CALLS[call]
    compiled = gradients(tensors, **options)
    request.getfixturevalue("uncompiled")
    for got, expected in zip(compiled, gradients(tensors, **options), strict=True):
        # Where logits reach 10^6, weights are those of logits rounded to 0.06.
        loose = {"rtol": 0.0, "atol": 2e-2 * expected.abs().max().item()}
        if got.dtype == torch.float16 or call == "large":
            torch.testing.assert_close(got, expected, **loose)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", SHARED)
def test_gradients_by_many_threads(
    call: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, options = CALLS[call]
    monkeypatch.setattr(pieces, "LOT", 1)
    threads(1)
    expected = gradients(tensors, **options)
    for n in (2, 5):
        threads(n)
        for got, want in zip(gradients(tensors, **options), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_a_long_call_is_cut_into_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are heard between them."""
    loop = fused.loop_for(X.device, X.dtype)
    assert loop is not None
    lots = []
    attend = loop.attend_again

    def counted(packed: bytes) -> int:
        kind = fused.Attend.from_address(AGAIN.unpack(packed)[0])
        lots.append((kind.first_tile, kind.last_tile))
        return attend(packed)

    monkeypatch.setattr(loop, "attend_again", counted)
    monkeypatch.setattr(pieces, "LOT", 1)
    x = numbers(1, 1, 400, 8)
    regard.trace(x, x, x, backend="tiled")
    assert lots == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"bias": biases.alibi(torch.full((4,), 0.1, requires_grad=True))},
        {"bias": biases.pairwise(lambda b, h, q, k: 0.1 * q)},
        {"score": scores.distance()},
        {"dropout": 0.1, "training": True},
    ],
    ids=["a learned bias", "a bias made of a function", "another score", "dropout"],
)
def test_what_is_not_fused(options: dict[str, Any]) -> None:
    assert not fuses([Q, K, V], **options)
    assert not fuses([Q.double(), K.double(), V.double()])
    assert not fuses([Q[:, :, :0], K, V])
    assert not fuses([Q, K[:, :, :1], V[:, :, :1]])
