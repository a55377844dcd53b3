"""A signal asks a run to stop, and a closed terminal does not end a run before it has saved."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm.runtime import stop as stopping
from jaxrl_llm.runtime.stop import Stopped, StopRequest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# A run that prints all the time, as training does, and saves when it is asked to stop.
RUN = """
import pathlib, sys, time
from jaxrl_llm.runtime.stop import Stopped, StopRequest
with StopRequest() as stop:
    try:
        for number in range(2000):
            print("iteration", number, flush=True)
            time.sleep(0.01)
            stop.check()
    except Stopped:
        print("saving", flush=True)
        print("saving", file=sys.stderr, flush=True)
        pathlib.Path(sys.argv[1]).write_text(stop.requested)
"""


@pytest.fixture(autouse=True)
def hangups_are_not_ignored():
    """The tests and their runs would inherit an ignored SIGHUP from a test run that `nohup` started."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_requests_a_stop_and_the_handlers_come_back(number, monkeypatch):
    monkeypatch.setattr(stopping, "_leave_terminal", lambda: None)  # the terminal is that of the test run
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(number)
        assert stop.requested == number.name
        with pytest.raises(Stopped):
            stop.check()
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_an_interrupt_after_a_request_is_immediate():
    with pytest.raises(KeyboardInterrupt), StopRequest():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_a_hangup_that_the_parent_ignores_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_closed_terminal_stops_a_run_that_can_still_save(tmp_path):
    saved = tmp_path / "saved"
    try:
        ours, terminal = pty.openpty()
    except OSError as error:
        pytest.skip(f"this machine has no terminals: {error}")
    # The first process of a session that opens a terminal is controlled by it.
    take_terminal = "import os\nos.open(os.ttyname(0), os.O_RDWR)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal + RUN, str(saved)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    while b"iteration 3" not in os.read(ours, 1000):
        pass
    os.close(ours)  # the kernel sends SIGHUP, and every write to the terminal fails from here on
    assert process.wait(60) == 0
    assert saved.read_text() == "SIGHUP"


def test_a_hangup_that_also_ends_the_reader_of_a_pipe_stops_a_run_that_can_still_save(tmp_path):
    """So it is with a run that writes to `tee log` in a terminal that is closed."""
    saved = tmp_path / "saved"
    command = [sys.executable, "-c", RUN, str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(0.005)
        process.stdout.close()
        assert process.wait(60) == 0
    assert saved.read_text() == "SIGHUP"
