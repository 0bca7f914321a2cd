"""Signals that cut a measurement off: real ones, sent to this process."""

import io
import os
import signal
import sys

import pytest

from toolkit.interruption import Interruption


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(which, capsys):
    before = signal.getsignal(which)
    with Interruption() as interruption:
        with interruption.listening():
            assert not interruption.asked()
            os.kill(os.getpid(), which)
            assert interruption.asked()
            assert "what has been measured follows" in capsys.readouterr().err
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), which)
        assert interruption.asked()
    assert signal.getsignal(which) is before


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_work_that_does_not_look_is_ended_at_once(which):
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), which)
        assert not interruption.asked()


def test_without_with_no_signal_is_heard():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption().listening():
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_is_heard_when_nobody_reads_what_is_said_about_it(monkeypatch):
    """`2>&1 | head` ends before the work does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as closed, Interruption() as interruption, interruption.listening():
        # Unbuffered, as standard error is: a write fails at once.
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(closed, write_through=True))
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.asked()
        monkeypatch.undo()


def test_an_error_that_a_library_makes_of_it_is_an_interruption_too():
    def imported():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ImportError("from its source folder") from None

    with pytest.raises(KeyboardInterrupt), Interruption():
        imported()
    # Without a signal, an error is itself.
    with pytest.raises(ImportError), Interruption():
        raise ImportError
