"""Several learners behind one aggregator, over loopback HTTP."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.errors import ConfigError, StructureError, WaitTimeout
from dmiddleware.worker import LearnerAggregator
from dmiddleware.worker.comm.http import Master, Slave
from dmiddleware.worker.errors import TaskFail

DEADLINE_S = 20.0
QUICK = {"request_retries": 1, "request_retry_waiting": 0.02}
merge_info = LearnerAggregator.merge_info


class Learner(Slave):
    """Learns as a script says: one reply, or error, for each name of a task."""

    def __init__(self, batch_size=2, **replies):
        super().__init__(port=0, heartbeat_span=0.2, **QUICK)
        self.batch_size = batch_size
        self.replies = replies
        self.tasks = []
        self.step = 0
        self.asked = threading.Event()

    def _process_task(self, task):
        self.tasks.append(task)
        self.asked.set()
        ids = {"task_id": "task", "buffer_id": "buffer"}
        name = task["name"]
        reply = self.replies.get(name)
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            return {**ids, **reply()}
        if name == "learner_get_data_task":
            return {
                **ids,
                "batch_size": self.batch_size,
                "cur_learner_iter": self.step,
                "seq": self.step,
                "lost": [],
            }
        if name == "learner_learn_task":
            self.step += 1
            info = {"learner_step": self.step, "learner_done": False, "priority_info": {}}
            return {**ids, "info": info}
        return ids

    def names(self):
        return [task["name"] for task in self.tasks]


@pytest.fixture
def cluster():
    """Start learners, an aggregator, and the coordinator's connection to it."""
    with contextlib.ExitStack() as stack:

        def cluster(*learners, **cfg):
            for learner in learners:
                stack.enter_context(learner)
            aggregator = LearnerAggregator(
                {
                    "slave": {"port": 0, "heartbeat_span": 0.2, **QUICK},
                    "master": {
                        "port": 0, "heartbeat_tolerance": 1.0, "heartbeat_check_span": 0.05, **QUICK
                    },
                    "learner": {
                        f"learner{i}": [f"id{i}", "127.0.0.1", one.port]
                        for i, one in enumerate(learners)
                    },
                    **cfg,
                }
            )  # fmt: skip
            stack.enter_context(aggregator)
            master = stack.enter_context(Master(port=0, **QUICK))
            connection = master.new_connection("aggregator", "127.0.0.1", aggregator.port)
            stack.enter_context(connection)

            def ask(name, **data):
                done = connection.new_task({"name": name, **data}).start().join(DEADLINE_S)
                if done.status != "completed":
                    raise TaskFail(done.result, done.message)
                return done.result

            return ask

        yield cluster


START = {"task_info": {"task_id": "task", "buffer_id": "buffer"}}


def test_the_resource_is_the_number_of_learners(cluster):
    ask = cluster(Learner(), Learner(), Learner())
    assert ask("resource") == {"gpu": 3, "cpu": 0}


def test_a_task_passes_to_all_learners_and_back(cluster):
    learners = Learner(batch_size=2), Learner(batch_size=3)
    ask = cluster(*learners)
    assert "2 learners" in ask("learner_start_task", attempt=1, **START)["message"]
    ids = {"task_id": "task", "buffer_id": "buffer"}
    assert ask("resource") == {"gpu": 2, "cpu": 0, "attempt": 1, **ids}
    demand = ask("learner_get_data_task")
    assert demand == {
        "task_id": "task",
        "buffer_id": "buffer",
        "batch_size": 5,
        "cur_learner_iter": 0,
        "seq": 0,
        "lost": [],
    }
    assert ask("learner_get_data_task") == demand, "until it is answered"
    data = [{"data_id": str(number)} for number in range(5)]
    learned = ask("learner_learn_task", data=data)
    assert learned == {
        "task_id": "task",
        "buffer_id": "buffer",
        "info": {"learner_step": 1, "learner_done": False, "priority_info": {}},
    }
    assert learners[0].tasks[-1]["data"] == data[:2]
    assert learners[1].tasks[-1]["data"] == data[2:]
    assert ask("learner_get_data_task")["seq"] == 1
    assert ask("learner_close_task") == ids
    assert ask("resource") == {"gpu": 2, "cpu": 0}
    assert all(one.names()[-1] == "learner_close_task" for one in learners)


def test_each_learner_gets_its_data_under_its_own_number(cluster):
    def demand():
        return {"batch_size": 1, "cur_learner_iter": 0, "seq": 4, "lost": ["one more"]}

    learners = Learner(batch_size=2), Learner(learner_get_data_task=demand)
    ask = cluster(*learners)
    ask("learner_start_task", **START)
    assert ask("learner_get_data_task")["seq"] == 0
    ask("learner_learn_task", data=[{"data_id": "d"}] * 3, seq=0)
    assert [one.tasks[-1]["seq"] for one in learners] == [0, 4]


def test_one_failed_start_closes_all_and_fails_the_task(cluster):
    good, bad = Learner(), Learner(learner_start_task=TaskFail({}, "no room"))
    ask = cluster(good, bad)
    with pytest.raises(TaskFail, match="learner1: no room"):
        ask("learner_start_task", **START)
    assert good.names() == ["learner_start_task", "learner_close_task"]
    assert bad.names() == ["learner_start_task"]


def test_a_round_waits_until_all_learners_have_demanded(cluster):
    ready = []

    def slow():
        return {"batch_size": 1, "cur_learner_iter": 0} if ready else {"pending": True}

    quick, late = Learner(batch_size=2), Learner(learner_get_data_task=slow)
    ask = cluster(quick, late)
    ask("learner_start_task", **START)
    assert ask("learner_get_data_task") == {
        "task_id": "task",
        "buffer_id": "buffer",
        "pending": True,
    }
    with pytest.raises(TaskFail, match="not all learners have demanded"):
        ask("learner_learn_task", data=[])
    ready.append(True)
    assert ask("learner_get_data_task")["batch_size"] == 3
    assert quick.names().count("learner_get_data_task") == 1


def test_learners_in_different_rounds_fail_the_task(cluster):
    ahead = Learner()
    ahead.step = 4
    other = Learner()
    ask = cluster(ahead, other)
    ask("learner_start_task", **START)
    with pytest.raises(TaskFail, match="cur_learner_iter"):
        ask("learner_get_data_task")
    assert ahead.names()[-1] == other.names()[-1] == "learner_close_task"


def test_a_wrong_amount_of_data_is_refused(cluster):
    ask = cluster(Learner(), Learner())
    ask("learner_start_task", **START)
    ask("learner_get_data_task")
    with pytest.raises(TaskFail, match="demanded 4 samples, and got 3"):
        ask("learner_learn_task", data=[{}, {}, {}])


def test_progress_is_passed_on_once_all_learners_have_reported(cluster):
    infos = iter([{"learner_step": 10, "priority_info": {"priority": [1.0]}}])

    def early():
        info = next(infos, None)
        report = {} if info is None else {"info": info}
        return {"batch_size": 1, "cur_learner_iter": 10, **report}

    late = Learner(
        learner_get_data_task=lambda: {"batch_size": 1, "cur_learner_iter": 10},
        learner_learn_task=lambda: {
            "info": {"learner_step": 10, "priority_info": {"priority": [2.0]}}
        },
    )
    first = Learner(learner_get_data_task=early, learner_learn_task=lambda: {"info": None})
    ask = cluster(first, late)
    ask("learner_start_task", **START)
    assert "info" not in ask("learner_get_data_task")
    assert ask("learner_learn_task", data=[{}, {}])["info"] == {
        "learner_step": 10,
        "priority_info": {"priority": [1.0, 2.0]},
    }


def test_the_last_progress_comes_with_the_close(cluster):
    last = {"info": {"learner_step": 3, "learner_done": True}}
    ask = cluster(*(Learner(learner_close_task=lambda: last) for _ in range(2)))
    ask("learner_start_task", **START)
    assert ask("learner_close_task")["info"] == {"learner_step": 3, "learner_done": True}


def test_a_learner_that_leaves_fails_the_round_and_the_next_task_may_start(cluster):
    waits = threading.Event()

    def until_closed():
        assert waits.wait(DEADLINE_S)
        return {}

    staying, leaving = Learner(), Learner(learner_get_data_task=until_closed)
    ask = cluster(staying, leaving)
    ask("learner_start_task", **START)
    leaving.asked.clear()

    def leave():
        assert leaving.asked.wait(DEADLINE_S)
        leaving.shutdown()

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(TaskFail, match="learner1"):
        ask("learner_get_data_task")
    thread.join(DEADLINE_S)
    waits.set()
    assert staying.names()[-1] == "learner_close_task"
    with pytest.raises(TaskFail, match="learner1"):
        ask("learner_start_task", **START)


def test_a_learner_that_does_not_close_in_order_is_reported_and_the_others_close(cluster):
    good, bad = Learner(), Learner(learner_close_task=TaskFail({}, "it hangs"))
    ask = cluster(good, bad)
    ask("learner_start_task", **START)
    with pytest.raises(TaskFail, match="it hangs"):
        ask("learner_close_task")
    assert good.names()[-1] == "learner_close_task"


def test_an_unknown_task_is_refused_with_the_known_ones(cluster):
    ask = cluster(Learner())
    with pytest.raises(TaskFail, match="learner_start_task"):
        ask("collector_start_task")


def test_start_names_the_learners_that_did_not_come():
    with Learner() as present:
        aggregator = LearnerAggregator(
            {
                "slave": {"port": 0},
                "master": {"port": 0, **QUICK},
                "learner": {
                    "here": ["a", "127.0.0.1", present.port],
                    "gone": ["b", "127.0.0.1", 9],
                },
                "max_retry_second": 0.01,
            }
        )
        with pytest.raises(WaitTimeout, match="of 2 learners, gone did not connect"):
            aggregator.start()
        aggregator.close()
        assert repr(aggregator) == "LearnerAggregator(here, gone)"


@pytest.mark.parametrize("learner", [{}, {"one": "127.0.0.1:80"}, {"one": ["127.0.0.1", 80]}])
def test_unusable_learners_are_refused(learner):
    with pytest.raises(ConfigError, match="learner"):
        LearnerAggregator({"learner": learner})


def test_the_defaults_are_the_classic_ones():
    default = LearnerAggregator.default_config()
    assert default.cfg_type == "LearnerAggregatorDict"
    assert default.max_retry_second == 60


def test_infos_merge_by_key_as_their_kind_says():
    infos = [
        {
            "learner_step": 7,
            "learner_done": False,
            "task_id": "task",
            "buffer_id": "buffer",
            "total_loss": loss,
            "name": name,
            "priority_info": {"priority": priority, "replay_unique_id": [name]},
            "nothing": None,
        }
        for loss, name, priority in ((0.5, "a", [1.0]), (0.25, "b", [2.0, 3.0]))
    ]
    assert merge_info(infos) == {
        "learner_step": 7,
        "learner_done": False,
        "task_id": "task",
        "buffer_id": "buffer",
        "total_loss": [0.5, 0.25],
        "name": ["a", "b"],
        "priority_info": {"priority": [1.0, 2.0, 3.0], "replay_unique_id": ["a", "b"]},
        "nothing": None,
    }


def test_learners_without_priorities_add_none():
    assert merge_info(info=[{}, {}]) == {}
    merged = merge_info([{"priority_info": {}}, {"priority_info": {"priority": [1.0]}}])
    assert merged == {"priority_info": {"priority": [1.0]}}
    assert merge_info([{}, {}]) == {}


@pytest.mark.parametrize("key", ["learner_step", "buffer_id", "task_id", "learner_done"])
def test_learners_that_disagree_on_what_they_share_are_an_error(key):
    with pytest.raises(StructureError, match=key):
        merge_info([{key: 1}, {key: 2}])


@pytest.mark.parametrize(
    ("infos", "word"),
    [
        ([{"a": 1, "b": 1}, {"a": 1}], "b"),
        ([{"a": 1}, {"a": 1, "b": 1}], "b"),
        ([{"a": None}, {"a": 1}], "NoneType"),
        ([{"a": [1]}, {"a": 1}], "list"),
        ([{"a": object()}, {"a": object()}], "object"),
    ],
)
def test_infos_of_different_shape_are_an_error(infos, word):
    with pytest.raises(StructureError, match=word):
        merge_info(infos)


LEAVES = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)


@given(
    st.recursive(LEAVES, lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    st.integers(1, 4),
)
def test_equal_infos_merge_to_as_many_values_as_there_are_learners(info, n_learners):
    def expected(value):
        if value is None:
            return None
        if isinstance(value, dict):
            return {key: expected(item) for key, item in value.items()}
        return value * n_learners if isinstance(value, list) else [value] * n_learners

    assert merge_info([info] * n_learners) == expected(info)
