"""Files that take long to write: one writer at a time, and nothing left of those that are ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import RegardError, RegardWarning
from regard.files import claimed, folder_of
from tests.fresh_process import Ended, FreshProcesses, Started

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="asks for Unix's signals")

WRITER = """
import time
from pathlib import Path
from regard.files import claimed
with claimed(Path(%r)) as folder:
    (folder / "8").write_bytes(bytes(1 << 20))
    print("begun", flush=True)
    time.sleep(60)
"""


def begun(fresh: FreshProcesses, program: str) -> Started:
    process, until = fresh.start(program), time.monotonic() + 60
    while process.out != "begun\n":
        assert time.monotonic() < until, process.out
        time.sleep(0.01)
    return process


def ended(process: Started, by: int) -> Ended:
    """It sleeps for a minute: one that does not hear is heard of."""
    started = time.monotonic()
    process.send_signal(by)
    end = process.wait()
    assert time.monotonic() - started < 30
    return end


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()


def test_a_second_writer_is_refused_and_a_killed_one_is_followed(
    tmp_path: Path, fresh: FreshProcesses
) -> None:
    path = tmp_path / "run.regard"
    process = begun(fresh, WRITER % str(path))
    try:
        with pytest.raises(RegardError, match="another process or thread is writing this file"):
            regard.watch(model(), keep="traces", spill=path).attach()
        with pytest.raises(RegardError, match=r"there is no such file[\s\S]*was broken off"):
            regard.load(path)
    finally:
        ended(process, signal.SIGKILL)
    assert os.listdir(tmp_path) == [".run.regard.parts"]
    net = model()
    watching = regard.watch(net, keep="traces", spill=path)
    with pytest.warns(RegardWarning, match=r"broken off before it was whole; the 1\.0 MiB"):
        watching.attach()
    net(torch.zeros(1, 3, 16))
    watching.detach()
    assert os.listdir(tmp_path) == ["run.regard"]
    with regard.load(path) as again:
        assert list(again) == ["self_attn"]


def test_one_thread_may_claim_again_and_another_may_not(tmp_path: Path) -> None:
    path, refused = tmp_path / "x", []

    def other() -> None:
        try:
            with claimed(path):
                pass
        except RegardError as error:
            refused.append(error)

    with claimed(path) as folder, claimed(path) as again:
        assert folder == again == folder_of(path)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert os.listdir(tmp_path) == []


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    folder_of(tmp_path / "x").symlink_to(tmp_path / "home")
    with pytest.raises(RegardError, match="not a folder that regard made"):
        regard.watch(model(), keep="traces", spill=tmp_path / "x").attach()
    assert os.listdir(tmp_path / "home") == ["letter"]


def test_long_names_can_be_claimed(tmp_path: Path) -> None:
    with claimed(tmp_path / ("x" * 250)) as folder:
        assert folder.is_dir()


RECORDER = """
import time
from regard import cli
from regard.commands import record as record_command

def record(reader, words, out, **how):
    from regard.files import folder_of
    (folder_of(out) / "8").write_bytes(b"half")
    print("begun", flush=True)
    time.sleep(60)

record_command.load = lambda *args, **how: None
record_command.record_text = record
cli.app(["record", "--model", "m", "--text", %r, "-o", %r])
"""


@pytest.mark.parametrize("by", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_recording_that_is_ended_leaves_nothing(
    by: str, tmp_path: Path, fresh: FreshProcesses
) -> None:
    (tmp_path / "text").write_text("a word")
    process = begun(fresh, RECORDER % (str(tmp_path / "text"), str(tmp_path / "run.regard")))
    end = ended(process, getattr(signal, by))
    assert end.code
    assert os.listdir(tmp_path) == ["text"]
    if by != "SIGINT":
        assert f"regard: ended by {by}; nothing was written or replaced" in end.err


def test_two_recordings_of_one_name(tmp_path: Path, fresh: FreshProcesses) -> None:
    from typer.testing import CliRunner

    from regard import cli

    (tmp_path / "text").write_text("a word")
    process = begun(fresh, WRITER % str(tmp_path / "run.regard"))
    try:
        words = ["record", "--model", "m", "--text", str(tmp_path / "text")]
        result = CliRunner().invoke(cli.app, [*words, "-o", str(tmp_path / "run.regard")])
    finally:
        ended(process, signal.SIGTERM)
    assert result.exit_code == 2
    assert "another process or thread is writing this file" in result.output
