"""Methods by which a rank gets one part of a call that it can answer for alone."""

from __future__ import annotations

from torch import Tensor

from regard.calls.choice import choose
from regard.inputs import AttentionInputs
from regard.traces import Trace


class OnePart:
    """The plain call runs on the part; answers about its queries are brought back."""

    def part(self) -> AttentionInputs:
        """The part of this rank."""
        raise NotImplementedError

    def check(self, backend: str | None, *, statistics: bool) -> None:
        """Refuse a backend that cannot run the part, where ranks may differ in that."""

    def of_rows(self, *answers: Tensor) -> tuple[Tensor, ...]:
        """Answers about the queries of the part, one for each, as those of this rank's queries."""
        return answers

    def attend(self, backend: str | None) -> Tensor:
        part = self.part()
        (out,) = self.of_rows(choose(part, backend, statistics=False).attend(part))
        return out

    def observe(self, backend: str | None) -> Trace:
        part = self.part()
        chosen = choose(part, backend, statistics=True)
        return Trace(part, chosen.observe(part), chosen.name, chosen.questions())
