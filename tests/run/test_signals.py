"""SIGTERM stops as Ctrl-C does, once, with its own exit code."""

import os
import signal

import anyio
import pytest

from agentrl.run.signals import EXIT_CODE, interrupted_at_once, stopped_by_sigterm


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_an_exit_once_and_its_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def stopped() -> None:
        with stopped_by_sigterm():
            with pytest.raises(KeyboardInterrupt):
                terminate()
            terminate()  # a second signal does not interrupt the shutdown
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        stopped()
    assert caught.value.code == EXIT_CODE == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_event_loop_cleans_up_first() -> None:
    cleaned = []

    async def run() -> None:
        try:
            terminate()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                cleaned.append("up")

    with pytest.raises(SystemExit) as caught, stopped_by_sigterm():
        anyio.run(run, backend_options={"use_uvloop": True})
    assert caught.value.code == EXIT_CODE
    assert cleaned == ["up"]


def test_ctrl_c_alone_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), stopped_by_sigterm():
        os.kill(os.getpid(), signal.SIGINT)


def test_blocking_code_in_a_loop_is_interrupted_at_once() -> None:
    async def run() -> None:
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupted_at_once():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == before

    anyio.run(run)


def test_a_background_job_of_a_script_stops_too() -> None:
    async def stopping() -> None:
        terminate()
        with anyio.fail_after(10):
            await anyio.sleep_forever()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught, stopped_by_sigterm():
            anyio.run(stopping, backend_options={"use_uvloop": True})
        assert caught.value.code == EXIT_CODE
    finally:
        signal.signal(signal.SIGINT, before)
