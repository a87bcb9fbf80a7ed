"""Which backend runs a call: the one that is asked for by name, or the first that can.

All backends are known here and nowhere else.
"""

from __future__ import annotations

from regard.backends.contract import Backend
from regard.backends.flex import Flex
from regard.backends.reference import Reference
from regard.backends.sdpa import Sdpa, hides
from regard.backends.tiled import Tiled, outruns_pytorch
from regard.backends.triton import Triton, outruns_cudnn
from regard.errors import RegardError
from regard.inputs import AttentionInputs

# In order of preference.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Sdpa(), Triton(), Flex(), Tiled(), Reference())
}
# The same without their names: torch.compile asks before every call whether a dictionary that it
# went through is still the same.
_ALL = tuple(BACKENDS.values())
_OBSERVERS = tuple(backend for backend in _ALL if backend.observes)


class _Asked:
    """What backends said of a call: each is asked once whether it can run it, since looking through
    a mask or at a GPU takes a while."""

    def __init__(self, inputs: AttentionInputs, statistics: bool) -> None:
        self.inputs, self.statistics = inputs, statistics
        self._answers: dict[str, list[str]] = {}

    def refuses(self, backend: Backend) -> list[str]:
        if backend.name not in self._answers:
            answer = backend.refuses(self.inputs, statistics=self.statistics)
            self._answers[backend.name] = answer
        return self._answers[backend.name]


def choose(inputs: AttentionInputs, name: str | None, *, statistics: bool) -> Backend:
    """The backend asked for, or the first that can run the call and is not reserved."""
    if name is None:
        asked = _Asked(inputs, statistics)
        for backend in _OBSERVERS if statistics else _ALL:
            if not _reserved(backend, asked) and not asked.refuses(backend):
                return backend
    if not isinstance(name, str) or name not in BACKENDS:
        raise RegardError(
            "unknown backend", got=repr(name), accepted=", ".join(map(repr, BACKENDS)) + " or None"
        )
    reasons = BACKENDS[name].refuses(inputs, statistics=statistics)
    if reasons:
        able = [
            repr(other.name)
            for other in BACKENDS.values()
            if not other.refuses(inputs, statistics=statistics)
        ]
        raise RegardError(
            f"backend {name!r} cannot run this call: {'; '.join(reasons)}",
            accepted=f"backends that can: {', '.join(able)}",
            do="name one of them, or leave backend= out",
        )
    return BACKENDS[name]


def refusals(
    inputs: AttentionInputs, chosen: Backend, asked: str | None, *, statistics: bool
) -> dict[str, list[str]]:
    """Why the backends that were not chosen were not."""
    answers = _Asked(inputs, statistics)
    return {
        name: _why_not(backend, answers, by_name=asked is not None)
        for name, backend in BACKENDS.items()
        if backend is not chosen
    }


def _why_not(backend: Backend, asked: _Asked, *, by_name: bool) -> list[str]:
    reasons = asked.refuses(backend)
    if reasons or by_name:
        return reasons
    reserved = _reserved(backend, asked)
    if not reserved:
        return []
    where = "" if reserved.startswith(("on ", "under ")) else ":"
    return [f"runs only when asked for{where} {reserved}"]


def _reserved(backend: Backend, asked: _Asked) -> str:
    """Why a backend that can run a call is left out unless it is asked for by name."""
    return backend.reserved(asked.inputs) or (_slower(asked) if backend.name == "sdpa" else "")


def _slower(asked: _Asked) -> str:
    """Why PyTorch's own kernels, which would come first, are left for ours."""
    inputs = asked.inputs
    if inputs.q.device.type != "cuda":
        quicker = outruns_pytorch(inputs)
        return "tiled, compiled for this CPU, is quicker" if quicker else ""
    if asked.refuses(BACKENDS["triton"]):
        return ""
    # PyTorch's CUDA kernels let a NaN behind a mask reach other rows. Ours mend that without
    # waiting for the device; around PyTorch's one has to ask.
    if hides(inputs):
        return "it would wait for the device to keep NaN at masked positions out"
    return "triton is quicker" if outruns_cudnn(inputs) else ""
