"""The line of the program to which an error or a crash belongs."""

from __future__ import annotations

import re

import pytest

from dmiddleware.launch.program_lines import CrashReport, program_line


def test_the_line_of_a_crash_is_that_of_the_thread_that_crashed() -> None:
    report = CrashReport()
    kept = []
    for line in (
        "Current thread 0x0001 (most recent call first):",
        '  File "/home/me/before.py", line 1 in dump',
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x0002 (most recent call first):",
        '  File "/home/me/other.py", line 2 in wait',
        "",
        "Current thread 0x0001 (most recent call first):",
        f'  File "{re.__file__}", line 3 in sub',
        '  File "/x/site-packages/torch/nn/module.py", line 4 in forward',
        '  File "/home/me/a folder/program.py", line 5 in main',
        '  File "/home/me/program.py", line 6 in other',
        "",
        "Thread 0x0003 (most recent call first):",
        '  File "/home/me/last.py", line 7 in wait',
        "",
        "Extension modules: numpy.core (total: 1)",
        # A process that the program has forked has crashed, and the program continues.
        "step 7",
        '  File "/home/me/printed.py", line 8 in the output',
    ):
        kept += [] if report.feed(line) else [line]
    assert report.where == "program.py:5"
    assert [line.split(",")[0] for line in kept] == [
        "Current thread 0x0001 (most recent call first):",
        '  File "/home/me/before.py"',
        "Fatal Python error: Segmentation fault",
        "step 7",
        '  File "/home/me/printed.py"',
    ]


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([], ""),
        ([("<frozen importlib>", 1)], "<frozen importlib>:1"),
        ([(re.__file__, 3)], "__init__.py:3"),
        ([("/x/dist-packages/torch/a.py", 1), ("<string>", 2)], "a.py:1"),
        ([("/x/dist-packages/torch/a.py", 1), ("/home/b.py", 2)], "b.py:2"),
    ],
)
def test_without_a_line_of_the_program_another_one_is_named(
    frames: list[tuple[str, int | None]], line: str
) -> None:
    assert program_line(frames) == line
