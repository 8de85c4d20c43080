"""SIGTERM is an exit."""

import os
import signal

import pytest

from agentrl.run.signals import EXIT_CODE, stopped_by_sigterm


def test_sigterm_is_an_exit_once_and_its_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_sigterm():
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == EXIT_CODE == 143
        os.kill(os.getpid(), signal.SIGTERM)  # a second one does not interrupt the stopping
    assert signal.getsignal(signal.SIGTERM) == before
