"""Interrupts, threads, tasks and copies: each watch sees its own runs, and nothing stays on."""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from tests.watching.left_behind import nothing_in, nothing_in_the_process


class Attends(nn.Module):
    """Self-attention of one head, by PyTorch's function or regard's."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.attend = attend
        self.before: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out = self.attend(q[:, None], k[:, None], v[:, None])[:, 0]
        if self.before is not None:
            self.before()
        return out


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends(**options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _interrupt() -> None:
    raise KeyboardInterrupt


X = torch.randn(2, 5, 8)


@pytest.mark.parametrize("where", ["root", "inner module", "its forward"])
def test_an_interrupt_ends_what_is_watched(where: str) -> None:
    model, other = Model(), Model()
    watch = regard.watch(model)
    seen = watch.attach()
    model.layers[1].before = _interrupt
    call = {"root": model, "inner module": model.layers[1], "its forward": model.forward}[where]
    with pytest.raises(KeyboardInterrupt):
        call(X)
    nothing_in_the_process()
    calls = {path: layer.calls for path, layer in seen.items()}
    other(X), F.scaled_dot_product_attention(X, X, X), regard.attention(X, X, X)
    assert {path: layer.calls for path, layer in seen.items()} == calls
    model.layers[1].before = None
    model(X)
    assert seen["layers.1"].calls == calls["layers.1"] + 1
    watch.detach()
    nothing_in(model)


# Where a generator is being closed, Python tells of an interrupt and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_nothing_on() -> None:
    """Where Python looks for signals: as functions begin, and after those that are not its own."""
    model, interrupted = Model(), 0
    whole = _moments(model)
    # All of the last ones: there the outermost module is left.
    moments = [*range(1, 60, 3), *range(60, whole - 90, 19), *range(whole - 90, whole + 1)]
    for moment in moments:
        watch = regard.watch(model)
        seen = watch.attach()
        try:
            sys.setprofile(_interrupting(moment))
            model(X)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(None)
        assert torch.is_grad_enabled()
        nothing_in_the_process()
        before = sum(layer.calls for layer in seen.values())
        F.scaled_dot_product_attention(X, X, X)
        assert sum(layer.calls for layer in seen.values()) == before
        model(X)
        watch.detach()
        nothing_in(model)
    assert interrupted > len(moments) // 2


class AttendsByHand(nn.Module):
    """By hand, and by a module whose function PyTorch asks a mode about in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (x @ x.mT).softmax(-1) @ x
        return x + self.attention(x, x, x)[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("observed", ["watched", "monitored"])
def test_an_interrupt_where_a_with_of_another_begins_or_ends(observed: str) -> None:
    """There PyTorch leaves autograd off, or a mode away; and what a generator has not put back it
    puts back when the last traceback that holds it is gone."""
    model, moment, done, interrupted = AttendsByHand(), 0, False, 0
    places = ("contextlib", "torch.overrides", "torch.autograd.grad_mode")
    before = regard.calls.watchers.caller.get()
    # What is made once, and a call that is looked at more closely.
    with regard.watch(model):
        model(X)
    while not done:
        moment += 1
        watch, monitors = regard.watch(model), list[regard.Monitor]()
        if observed == "watched":
            watch.attach()
        else:
            monitors.append(regard.Monitor(model, rules=(), on_error="raise", logits=True))
        try:
            with torch.autocast("cpu", torch.bfloat16):
                sys.setprofile(_interrupting(moment, places))
                try:
                    model(X)
                    if monitors:
                        monitors[0].step()
                    watch.detach()
                    done = sys.getprofile() is not None
                finally:
                    sys.setprofile(None)
        except KeyboardInterrupt:
            interrupted += 1
        assert torch.is_grad_enabled(), moment
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        nothing_in_the_process()
        assert regard.calls.watchers.caller.get() is before
        watch.detach()
        for monitor in monitors:
            monitor.close()
        nothing_in(model)
    assert interrupted > 20


@pytest.mark.skipif(
    hasattr(regard.Monitor.step, "__wrapped__"), reason="checked calls have more frames"
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "what", ["attach", "detach", "a with", "the end of one", "a monitor", "its end"]
)
def test_an_interrupt_of_attaching_or_detaching_leaves_nothing_on(what: str) -> None:
    model, moment, done = Model(), 0, False
    while not done:
        moment += 1
        watch, monitors = regard.watch(model), list[regard.Monitor]()
        if what == "detach":
            watch.attach()
        if what == "the end of one":
            watch.__enter__()
        if what == "its end":
            monitors.append(regard.Monitor(model, rules=()))
        work: dict[str, Callable[[], Any]] = {
            "attach": watch.attach,
            "a with": watch.__enter__,
            "the end of one": partial(watch.__exit__, None, None, None),
            "detach": watch.detach,
            "a monitor": lambda found=monitors: found.append(regard.Monitor(model, rules=())),
            "its end": lambda found=monitors: found[0].close(),
        }
        whole = False
        try:
            sys.setprofile(_interrupting(moment, None))
            work[what]()
            whole = True
            # One that is raised while something is collected goes unheard.
            done = sys.getprofile() is not None
        except KeyboardInterrupt:
            sys.setprofile(None)
            # Nobody is given anything that could be ended, or ended again; if it began to.
            if (what == "a with" and not whole) or (what == "the end of one" and moment > 1):
                nothing_in_the_process()
                nothing_in(model)
        finally:
            sys.setprofile(None)
        watch.detach()
        for monitor in monitors:
            monitor.close()
        nothing_in_the_process()
        nothing_in(model)
    assert moment > 20


def _moments(model: nn.Module) -> int:
    """In how many places of a watched run an interrupt is heard."""
    heard = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal heard
        heard += event in ("call", "c_return") and "regard" in frame.f_globals.get("__name__", "")

    watch = regard.watch(model)
    watch.attach()
    # The first run builds what later ones find.
    for _ in range(2):
        heard = 0
        sys.setprofile(profile)
        model(X)
        sys.setprofile(None)
    watch.detach()
    return heard


def _interrupting(moment: int, places: tuple[str, ...] | None = ("regard",)) -> Callable[..., None]:
    """In modules that have one of these in their names, or anywhere."""
    at = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal at
        name = frame.f_globals.get("__name__", "")
        here = places is None or any(place in name for place in places)
        if event in ("call", "c_return") and here:
            at += 1
            if at == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

    return profile


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_real_signal_during_training() -> None:
    model, other = Model(), Model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    # What PyTorch imports when it is first needed.
    model(X).square().mean().backward()
    optimiser.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    monitor = regard.Monitor(model, look=1, every=5, qk_clip=1e6, rules=())
    interrupted = 0
    for n in range(12):
        old = signal.signal(signal.SIGALRM, lambda *_: _interrupt())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0007 * n)
            while True:
                model(X).square().mean().backward()
                optimiser.zero_grad()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        nothing_in_the_process()
        other(1e4 * X)
        monitor.step()
    assert interrupted == 12
    # Logits of the other model, 1e8, would have been clipped.
    torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
    monitor.close()
    nothing_in(model)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_step_is_in_the_report_or_not_in_it() -> None:
    model, interrupted = Model(), 0
    for moment in range(1, 70):
        with regard.Monitor(model, look=1, every=9, rules=(), on_error="raise") as monitor:
            model(X)
            try:
                sys.setprofile(_interrupting(moment))
                monitor.step()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.setprofile(None)
        for report in monitor.history:
            assert report.looks == 1
            assert list(report.layers) == ["layers.0", "layers.1"]
    assert interrupted > 10


def test_threads_see_their_own() -> None:
    """A served model, each request watched in its thread, beside one that does not watch."""
    model, mine = Model(), Model()
    errors: list[Exception] = []
    stop = threading.Event()

    def unwatched() -> None:
        while not stop.is_set():
            try:
                out = regard.attention(X, X, X, mask=regard.masks.causal())
                assert torch.isfinite(out).all()
                mine(X)
            except Exception as error:
                errors.append(error)
                raise

    def request(n: int) -> list[tuple[int, ...]]:
        x = torch.randn(1, n + 1, 8)
        with regard.watch(model, keep="traces") as seen:
            model(x)
        return [tuple(t.inputs.q.shape) for layer in seen.values() for t in layer.traces]

    beside = threading.Thread(target=unwatched)
    beside.start()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(request, range(40)))
    stop.set()
    beside.join()
    assert errors == []
    assert found == [[(1, 1, n + 1, 8)] * 2 for n in range(40)]
    nothing_in(model)


def test_multi_head_attention_in_two_threads() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()

    def request(n: int) -> int:
        with regard.watch(model) as seen:
            model(torch.randn(1, n + 2, 8))
        return seen["self_attn"].calls

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(request, range(20))) == [1] * 20
    nothing_in_the_process()
    nothing_in(model)


def test_tasks_see_their_own() -> None:
    model = Model()

    async def request(n: int) -> list[int]:
        with regard.watch(model, keep="traces") as seen:
            await asyncio.sleep(0)
            model(torch.randn(1, n + 1, 8))
            await asyncio.sleep(0)
        return [t.inputs.q.shape[2] for t in seen["layers.0"].traces]

    async def serve() -> list[list[int]]:
        return await asyncio.gather(*(request(n) for n in range(5)))

    assert asyncio.run(serve()) == [[n + 1] for n in range(5)]


def test_a_watch_that_never_saw_its_thread_run_says_so() -> None:
    model = Model()
    said = pytest.raises(regard.RegardError, match="other threads")
    with ThreadPoolExecutor(1) as pool, said, regard.watch(model):
        pool.submit(model, X).result()
    nothing_in(model)


def test_attached_it_sees_every_thread() -> None:
    model = Model()
    watch = regard.watch(model)
    seen = watch.attach()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, X).result()
    model(X)
    watch.detach()
    assert seen["layers.0"].calls == 2


def test_attached_runs_at_once_are_seen_whole_or_not_at_all() -> None:
    model = Model()
    watch = regard.watch(model)
    seen = watch.attach()
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model(X), range(200)))
        expected = model(X)
    watch.detach()
    assert all(torch.allclose(out, expected, atol=1e-6) for out in found)
    assert 1 <= seen["layers.0"].calls == seen["layers.1"].calls <= 201
    nothing_in(model)


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_are_not_watched(how: str) -> None:
    model = Model().eval()
    own = list(vars(model))
    model.register_forward_hook(_their_hook)
    monitor = regard.Monitor(model, rules=())
    watch = regard.watch(model)
    seen = watch.attach()
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        assert b"regard" not in file.getvalue().replace(b"tests.watching", b"")
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        make: dict[str, Callable[[nn.Module], nn.Module]] = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        }
        twin = make[how](model)
    expected = model(X)
    calls = seen["layers.0"].calls
    if how != "copy":
        nothing_in(nn.ModuleList(twin.layers))
    assert list(vars(twin)) == own
    assert [*twin._forward_hooks.values()] == [_their_hook]
    torch.testing.assert_close(twin(X), expected, rtol=0, atol=0)
    if how != "copy":
        assert seen["layers.0"].calls == calls
    monitor.close()
    watch.detach()
    with regard.watch(twin) as seen_twin:
        twin(X)
    assert len(seen_twin) == 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "bytes", "to_dict", "deepcopy of a config"])
def test_copies_taken_during_a_run_have_their_own_implementation(how: str) -> None:
    """As of another thread that saves a model while it is trained on."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaModel(config)
    make: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(model).config._attn_implementation,
        "pickle": lambda: pickle.loads(pickle.dumps(model.config))._attn_implementation,
        "bytes": lambda: "regard" if b"regard" in pickle.dumps(model.config) else "sdpa",
        "to_dict": lambda: model.config.to_dict().get("_attn_implementation", "sdpa"),
        "deepcopy of a config": lambda: copy.deepcopy(model.config)._attn_implementation,
    }
    found: list[Any] = []
    model.layers[0].mlp.register_forward_hook(lambda *_: found.append(make[how]()))
    with regard.watch(model):
        model(torch.tensor([[1, 2, 3]]))
    assert found == ["sdpa"]
    assert type(model.config._attn_implementation) is str


def _their_hook(*_: object) -> None:
    pass


def test_copies_taken_while_a_watch_comes_or_goes() -> None:
    """As of another thread, between any two calls that attaching and detaching make."""
    model, copies = Attends(), 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal copies
        if "regard" in frame.f_globals.get("__name__", ""):
            sys.setprofile(None)
            nothing_in(copy.deepcopy(model))
            copies += 1
            sys.setprofile(profile)

    watch = regard.watch(model)
    try:
        sys.setprofile(profile)
        watch.attach()
        watch.detach()
    finally:
        sys.setprofile(None)
    assert copies > 20


def test_averaged_weights_while_monitored() -> None:
    model = Model()
    with regard.Monitor(model, rules=()):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        model(X).sum().backward()
        averaged.update_parameters(model)
    averaged(X)
    nothing_in(averaged)


def test_attaching_that_fails_midway_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.watching import followed_modules

    model, real, left = Model(), followed_modules.follow, 2

    def failing(*args: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise MemoryError
        real(*args)

    monkeypatch.setattr(followed_modules, "follow", failing)
    with pytest.raises(MemoryError):
        regard.watch(model).attach()
    nothing_in(model)


@pytest.mark.compiled
def test_in_place_compiling_survives() -> None:
    model = Model()
    model.compile(backend="eager")
    compiled = vars(model)["_compiled_call_impl"]
    with torch.no_grad(), regard.watch(model) as seen:
        model(X)
    assert len(seen) == 2
    assert vars(model)["_compiled_call_impl"] is compiled


def test_replicas_run_themselves() -> None:
    """nn.DataParallel copies all that a module holds, its call too."""
    model = Attends()
    with regard.watch(model):
        model(X)
        replica = model._replicate_for_data_parallel()
        replica.q_proj = nn.Linear(8, 8)
        assert not torch.equal(replica(X), model(X))
