"""The description of a chain, for people."""

from __future__ import annotations

import io

from rich.console import Console

from dmiddleware import Task, middleware
from middleware import OnlineRLContext, Role


@middleware(roles=(Role.COLLECTOR,), writes=("trajectories", "episodes"))
def collect(ctx):
    pass


@middleware(roles=(Role.LEARNER, Role.EVALUATOR), reads=("train_data",))
def learn(ctx):
    pass


def log(ctx):
    pass


def described():
    task = Task(OnlineRLContext(), roles=(Role.COLLECTOR,), name="trial")
    return task.use(collect).use(task.parallel(learn, log), lock=True).describe()


def test_every_middleware_has_a_row_with_its_declarations():
    table = described()
    rows = [(row.path, row.name, row.active, row.locked) for row in table.rows]
    assert rows == [
        ("1", "collect", True, False),
        ("2", "parallel", True, True),
        ("2.1", "learn", False, False),
        ("2.2", "log", True, False),
    ]
    assert table.rows[0].writes == ("trajectories", "episodes")
    assert table.rows[2].reads == ("train_data",)
    assert table.rows[2].roles == ("learner", "evaluator")
    assert table.rows[0].location.endswith(f"test_describe.py:{collect.__code__.co_firstlineno}")


def test_str_returns_a_plain_table():
    lines = str(described()).splitlines()
    assert lines[0] == "trial: collector"
    assert lines[1].split() == [
        "#",
        "middleware",
        "roles",
        "reads",
        "writes",
        "here",
        "defined",
        "in",
    ]
    assert lines[2].startswith("1    collect            collector")
    assert "trajectories, episodes  active" in lines[2]
    assert lines[3].startswith("2    parallel (locked)  all")
    assert lines[4].startswith("2.1    learn")
    assert "inactive" in lines[4]
    assert len({line.index("test_describe") for line in (lines[2], lines[4], lines[5])}) == 1


def test_rich_prints_a_rich_table():
    console = Console(file=io.StringIO(), width=120)
    console.print(described())
    text = console.file.getvalue()
    assert "trial: collector" in text
    assert "│ 2.1 │" in text
    assert "trajectories" in text
    assert "inactive" in text


def test_the_title_says_that_a_task_has_no_roles():
    task = Task(OnlineRLContext()).use(collect)
    assert str(task.describe()).startswith("task: all roles")
