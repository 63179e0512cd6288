"""The tape records marks in order."""

from __future__ import annotations

import threading

import pytest

from dmiddleware import Context, Task
from dmiddleware.testing import Tape


def test_it_records_marks_in_order():
    tape = Tape()
    tape("a")
    tape("b", 2)
    tape()
    assert list(tape) == ["a", ("b", 2), ()]
    assert len(tape) == 3
    tape.clear()
    assert list(tape) == []


def test_it_compares_with_lists_and_tapes():
    tape, same = Tape(), Tape()
    tape("a")
    same("a")
    assert tape == ["a"]
    assert tape == same
    assert tape != ["b"]
    assert tape != "a"
    assert repr(tape) == "Tape(['a'])"


def test_its_middleware_record_the_order_of_a_chain():
    tape = Tape()
    with Task(Context()) as task:
        task.use(tape.generator("outer")).use(tape.function("inner")).run(max_step=1)
    assert tape == ["outer", "inner", "/outer"]
    assert tape.function("x").__name__ == tape.generator("x").__name__ == "x"


def test_its_generators_record_errors_and_reraise_them():
    tape = Tape()

    def fail(ctx):
        raise KeyError

    with pytest.raises(KeyError), Task(Context()) as task:
        task.use(tape.generator("outer")).use(fail).run()
    assert tape == ["outer", "!outer"]


def test_a_test_can_wait_for_marks_of_other_threads():
    tape = Tape()
    thread = threading.Thread(target=lambda: [tape(n) for n in range(3)])
    thread.start()
    tape.wait_for(3)
    thread.join(20)
    assert tape == [0, 1, 2]
    with pytest.raises(AssertionError, match="expected 4 marks"):
        tape.wait_for(4, timeout_s=0.0)
