"""Signals that wait until the work can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dmiddleware.process.signals import HeldSignals, Terminated


@contextmanager
def handled_by(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_signal_is_raised_where_the_work_may_stop() -> None:
    tape: list[str] = []
    with (
        handled_by(signal.SIGTERM, lambda number, frame: tape.append("handler")),
        pytest.raises(Terminated, match="received SIGTERM"),
        HeldSignals() as signals,
    ):
        signal.raise_signal(signal.SIGTERM)
        tape.append("after the signal")
        with signals.interruptible():
            tape.append("unreachable")
    assert tape == ["after the signal", "handler"]


def test_the_reason_names_the_signal() -> None:
    reasons: list[str] = []
    with (
        handled_by(signal.SIGINT, lambda number, frame: None),
        HeldSignals(reasons.append) as signals,
    ):
        assert signals.reason is None
        signal.raise_signal(signal.SIGINT)
        assert reasons == [signals.reason] == ["received SIGINT (Ctrl-C)"]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with (
        handled_by(signal.SIGINT, signal.default_int_handler),
        pytest.raises(KeyboardInterrupt),
        HeldSignals(),
    ):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_without_an_interruptible_block_is_sent_again_at_the_end() -> None:
    received: list[int] = []
    handler = handled_by(signal.SIGTERM, lambda number, frame: received.append(number))
    with handler, HeldSignals():
        signal.raise_signal(signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored() -> None:
    with handled_by(signal.SIGINT, signal.SIG_IGN):
        with HeldSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.reason is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_are_left_alone() -> None:
    handlers: list[Any] = []

    def look() -> None:
        with HeldSignals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert handlers == [before]


def test_custom_handlers_receive_their_signals_at_once_if_only_default_ones_are_held() -> None:
    received: list[int] = []
    with handled_by(signal.SIGTERM, lambda number, frame: received.append(number)):
        with HeldSignals(only_default=True) as signals:
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM]
            assert signals.reason is None
        assert received == [signal.SIGTERM]


def test_an_error_is_not_replaced_by_the_signal_before_it() -> None:
    with (
        handled_by(signal.SIGTERM, signal.SIG_DFL),
        pytest.raises(ValueError, match="no"),
        HeldSignals(),
    ):
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("no")


def test_sigterm_with_the_default_handler_exits_in_order() -> None:
    with (
        handled_by(signal.SIGTERM, signal.SIG_DFL),
        pytest.raises(SystemExit) as caught,
        HeldSignals() as signals,
    ):
        signal.raise_signal(signal.SIGTERM)
        with signals.interruptible():
            pytest.fail("the block must not start")
    assert caught.value.code == 143
