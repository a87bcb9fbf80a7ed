"""A kernel's side of the wire to a notebook, with nobody at the other end but the test."""

from __future__ import annotations

import queue
from typing import Any

import comm
import pytest
from comm.base_comm import BaseComm

PATIENCE = 20


class Wire(BaseComm):
    """Keeps what a widget sends, and hands it what a notebook would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: queue.Queue[tuple[dict[str, Any], list[bytes]]] = queue.Queue()
        super().__init__(*args, **kwargs)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
    ) -> None:
        if msg_type == "comm_msg" and data["method"] == "custom":
            self.sent.put((data["content"], [bytes(part) for part in buffers or []]))

    def give(self, **data: Any) -> None:
        """A message of the front end: `method="custom"` or `method="update"`."""
        message = {"content": {"comm_id": self.comm_id, "data": {"buffer_paths": [], **data}}}
        self.handle_msg({"buffers": [], **message})

    def ask(self, number: str, name: str, **asked: Any) -> None:
        self.give(method="custom", content={"number": number, "name": name, "asked": asked})

    def heard(self) -> tuple[dict[str, Any], list[bytes]]:
        """The next answer."""
        return self.sent.get(timeout=PATIENCE)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widgets made in the test are on a wire of their own: `made.comm`."""
    monkeypatch.setattr(comm, "create_comm", Wire)
