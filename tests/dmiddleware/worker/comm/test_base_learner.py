"""Communicating learners with a real learner and policy, driven through their callbacks."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from dmiddleware.classic import Policy
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker import BaseLearner, FlaskFileSystemLearner
from dmiddleware.worker.comm.base_learner import create_comm_learner, load_data_fn
from dmiddleware.worker.errors import StepDataLost, TaskFail
from tests.dmiddleware.worker.comm.comm_workers import (
    DEADLINE_S,
    Learner,
    learner_task,
    metadata,
    put_samples,
    sample,
)


@pytest.fixture
def worker():
    with Learner() as worker:
        yield worker


def demanded(worker):
    """Return the next demand; the task must not fail or report progress before."""
    answer = worker.deal_with_get_data(DEADLINE_S)
    assert "pending" not in answer
    return answer


def test_a_task_learns_from_what_it_demands_and_reports_that_it_is_done(worker):
    assert "l" in worker.deal_with_learner_start(learner_task())["message"]
    data = put_samples(worker.memory, 4)
    for iteration in range(3):
        demand = demanded(worker)
        assert (demand["task_id"], demand["buffer_id"]) == ("l", "b")
        assert (demand["batch_size"], demand["cur_learner_iter"]) == (4, iteration)
        assert (demand["seq"], demand["lost"]) == (iteration, [])
        assert demand == demanded(worker), "the same again until it is answered"
        answer = worker.deal_with_learner_learn(data)
        assert (answer["task_id"], answer["buffer_id"]) == ("l", "b")
    learned = answer["info"]
    assert learned["learner_done"] and learned["learner_step"] == 3
    assert worker.deal_with_learner_close() == {"task_id": "l", "buffer_id": "b"}
    version, state = worker.memory.newest("p", -1)
    assert version == state["iter"] == 3
    assert set(state) == {"model", "acting", "iter"}


def test_the_policy_is_published_before_the_first_data(worker):
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    assert worker.memory.newest("p", -1)[0] == 0


def test_a_later_attempt_publishes_newer_versions(worker):
    worker.deal_with_learner_start(learner_task(), attempt=1)
    demanded(worker)
    assert worker.memory.newest("p", 10**9)[1]["iter"] == 0


def train(worker, until_iter):
    """Answer the learner's demands until it has published the weights of an iteration."""
    data = put_samples(worker.memory, 4)
    while (weights := worker.memory.newest("p", -1)) is None or weights[1]["iter"] < until_iter:
        demanded(worker)
        worker.deal_with_learner_learn(data)
    assert weights[1]["iter"] == until_iter
    return weights[1]


def finish(worker):
    """Answer the learner's demands until it is done, and return what it reports then."""
    data = put_samples(worker.memory, 4)
    while True:
        answer = worker.deal_with_get_data(DEADLINE_S)
        if "pending" not in answer:
            answer = worker.deal_with_learner_learn(data)
        if (info := answer.get("info")) is not None and info["learner_done"]:
            return info


def test_a_later_attempt_continues_from_the_newest_checkpoint(tmp_path):
    hook = {"save_ckpt_after_iter": 1, "save_ckpt_after_run": False}
    task = learner_task(train_iterations=5, exp_name=str(tmp_path), hook=hook)
    with Learner() as worker:
        worker.deal_with_learner_start(task)
        learned = train(worker, 3)
    (tmp_path / "ckpt_learner" / "damaged.safetensors").write_bytes(b"?")
    with Learner() as worker:
        worker.deal_with_learner_start(task, attempt=1)
        assert demanded(worker)["cur_learner_iter"] == 3
        continued = worker.memory.newest("p", -1)[1]
        torch.testing.assert_close(continued["model"], learned["model"], rtol=0, atol=0)
        assert finish(worker)["learner_step"] == 5


@pytest.mark.parametrize(("policy_id", "attempt"), [("q", 1), ("p", 0)])
def test_an_attempt_does_not_continue_another_run(tmp_path, policy_id, attempt):
    task = learner_task(exp_name=str(tmp_path), hook={"save_ckpt_after_iter": 1})
    with Learner() as worker:
        worker.deal_with_learner_start(task)
        train(worker, 2)
    with Learner() as worker:
        worker.deal_with_learner_start({**task, "policy_id": policy_id}, attempt)
        assert demanded(worker)["cur_learner_iter"] == 0
        assert worker.memory.newest(policy_id, -1)[1]["iter"] == 0


def test_a_later_attempt_does_not_load_the_checkpoint_that_the_first_one_began_with(tmp_path):
    hook = {"save_ckpt_after_iter": 1, "save_ckpt_after_run": False}
    with Learner() as worker:
        worker.deal_with_learner_start(learner_task(exp_name=str(tmp_path / "old"), hook=hook))
        train(worker, 1)
    hook["load_ckpt_before_run"] = str(tmp_path / "old/ckpt_learner/iteration_1.safetensors")
    task = learner_task(exp_name=str(tmp_path / "new"), hook=hook)
    for attempt in range(2):
        with Learner() as worker:
            worker.deal_with_learner_start(task, attempt)
            train(worker, 2 + attempt)


def test_a_close_ends_a_learner_that_waits_for_data(worker):
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    learner = worker.job.learner
    answer = worker.deal_with_learner_close()
    assert answer["info"]["learner_done"] and learner.learn_info["learner_done"]
    assert worker.job is None


def test_a_lost_sample_is_replaced_and_named(worker):
    worker.deal_with_learner_start(learner_task(train_iterations=1))
    data = put_samples(worker.memory, 5)
    worker.memory.delete(["d1"])
    demanded(worker)
    answer = worker.deal_with_learner_learn(data[:4])
    assert answer["info"] is None
    demand = demanded(worker)
    assert (demand["batch_size"], demand["lost"], demand["seq"]) == (1, ["d1"], 1)
    answer = worker.deal_with_learner_learn(data[4:])
    assert answer["info"]["learner_step"] == 1


def test_samples_are_read_before_the_next_demand_lets_the_coordinator_delete_them(worker):
    worker.deal_with_learner_start(learner_task(train_iterations=2, dataloader={"num_workers": 1}))
    for _ in range(2):
        data = put_samples(worker.memory, 4)
        demanded(worker)
        answer = worker.deal_with_learner_learn(data)
        worker.memory.clear()
    while answer["info"] is None or not answer["info"]["learner_done"]:
        answer = worker.deal_with_get_data(DEADLINE_S)
        answer.setdefault("info", None)
        if "pending" not in answer:
            answer.update(worker.deal_with_learner_learn(put_samples(worker.memory, 4)))
    assert answer["info"]["learner_step"] == 2


def test_an_error_in_the_task_is_reported_with_its_traceback(worker):
    task = learner_task()
    task["policy"]["model"]["obs_shape"] = -1
    worker.deal_with_learner_start(task)
    with pytest.raises(TaskFail, match="Traceback"):
        worker.deal_with_get_data(DEADLINE_S)
    assert worker.job is None


def test_a_batch_of_another_size_fails_the_task(worker):
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    with pytest.raises(TaskFail, match="demanded 4 samples and got 1"):
        worker.deal_with_learner_learn(put_samples(worker.memory, 1), DEADLINE_S)


def test_data_that_nobody_demanded_is_refused(worker):
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    worker.deal_with_learner_learn(put_samples(worker.memory, 4), 0.0)
    worker.job.demand = None
    with pytest.raises(TaskFail, match="not demanded"):
        worker.deal_with_learner_learn([])


def test_a_closed_task_reports_what_it_has_learned_with_its_end(worker):
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    end = worker.deal_with_learner_close()
    assert end["info"]["learner_done"]
    assert end["task_id"] == "l"


def test_a_task_that_takes_long_to_end_is_pending_and_its_end_is_kept(worker):
    go_on = threading.Event()
    worker.deal_with_learner_start(learner_task())
    demanded(worker)
    stop = worker._stop_work
    worker._stop_work = lambda job: [stop(job), go_on.wait(DEADLINE_S)]
    pending = {"pending": True, "task_id": "l", "buffer_id": "b"}
    assert worker.deal_with_learner_close(0.01) == pending
    assert worker.deal_with_learner_close(0.0) == pending
    go_on.set()
    wait([worker.job.end], DEADLINE_S)
    assert worker.deal_with_learner_close(0.0)["info"]["learner_done"]
    assert worker.job is None


@pytest.mark.parametrize("key", ["task_id", "buffer_id", "policy_id", "learner_cfg", "policy"])
def test_an_incomplete_task_is_refused(worker, key):
    task = learner_task()
    del task[key]
    with pytest.raises(ConfigError, match=key):
        worker.deal_with_learner_start(task)


def test_a_learner_has_one_gpu_for_each_rank_unless_the_config_says_otherwise(worker):
    assert worker.deal_with_resource() == {"gpu": 1, "cpu": 0}
    assert (worker.rank, worker.world_size) == (0, 1)
    assert Learner({"resource": {"gpu": 0}}).deal_with_resource()["gpu"] == 0


def test_loading_a_sample_adds_its_metadata():
    meta = metadata(priority=2.0)
    loaded = load_data_fn("d", meta, {"d": sample()}.__getitem__)
    assert loaded["priority"] == 2.0 and loaded["action"] == 0


def test_an_unroll_is_cut_out_of_its_trajectory():
    trajectory = [sample(index) for index in range(6)]
    read = {"d": trajectory}.__getitem__
    two = load_data_fn("d", metadata(unroll_split_begin=3, unroll_len=2), read)
    assert [step["action"] for step in two] == [1, 0] and two[1]["env_id"] == 0
    one = load_data_fn("d", metadata(unroll_split_begin=3, unroll_len=1), read)
    assert one["action"] == 1
    assert len(load_data_fn("d", metadata(), read)) == 6
    assert "env_id" not in trajectory[0], "the stored data is not changed"


def test_lost_data_is_an_error_that_names_it():
    def read(ref):
        raise StepDataLost("gone", data_id=ref)

    with pytest.raises(StepDataLost) as error:
        load_data_fn("d", metadata(), read)
    assert error.value.data_id == "d"


def test_a_loader_can_be_sent_to_another_process():
    load = functools.partial(load_data_fn, "d", metadata("d"), {"d": sample()}.__getitem__)
    assert pickle.loads(pickle.dumps(load))()["data_id"] == "d"


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(RegistryError, match="comm learner"):
        create_comm_learner({"type": "no_such"})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 1])
def test_with_multi_gpu_the_learner_joins_the_process_group_and_leaves_it(tmp_path, size):
    program = """
import os
import torch.distributed as dist
from tests.dmiddleware.worker.comm.comm_workers import Learner

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert not dist.is_initialized()
with Learner({"multi_gpu": True}) as worker:
    # A single rank needs no group.
    assert dist.is_initialized() == (size > 1)
    assert (worker.rank, worker.world_size) == (rank, size)
assert not dist.is_initialized()
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[4],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                "DITASK_RANK_STORE": str(tmp_path / "ranks"),
            },
        )
        for rank in range(size)
    ]  # fmt: skip
    assert [rank.wait(timeout=100) for rank in ranks] == [0] * size


@pytest.mark.parametrize("extra", [{}, {"policy_id": "p"}])
def test_a_learner_is_created_from_its_config_and_its_policy_alone(worker, extra):
    task = learner_task()
    learner = worker._create_learner(
        {"learner_cfg": task["learner_cfg"], "policy": task["policy"], **extra}
    )
    with learner:
        assert learner.policy_id == extra.get("policy_id", "")
        assert learner.policy.get_attribute("batch_size") == 4
        assert (learner.get_data, learner.send_policy) == (worker.get_data, worker.send_policy)


def test_a_worker_has_the_attributes_of_the_classic_interface():
    worker = Learner({"multi_gpu": False})
    assert (worker._learner_uid, worker._multi_gpu) == (worker.learner_uid, False)
    assert worker._end_flag
    with worker:
        assert not worker._end_flag
        with worker._timer:
            pass
        assert worker._timer.value >= 0
    assert worker._end_flag


def test_progress_is_also_sent_by_the_keyword_learn_info(worker):
    worker.deal_with_learner_start(learner_task())
    worker.send_learn_info(learn_info={"learner_step": 9})
    worker.send_learn_info(info={"learner_done": False})
    assert worker.deal_with_get_data(DEADLINE_S)["info"]["learner_step"] == 9


def test_a_learner_over_http_has_the_loading_function_too():
    assert FlaskFileSystemLearner.load_data_fn is load_data_fn


def test_a_batch_of_several_kinds_is_demanded_as_a_dictionary():
    asked = []

    def get_data(batch_size):
        asked.append(batch_size)
        return [
            functools.partial(dict, kind=kind) for kind, n in batch_size.items() for _ in "x" * n
        ]

    class Mixed(Policy):
        config = {"learn": {"batch_size": {"expert": 2, "own": 3}}}

        def _forward_learn(self, data):
            return {"total_loss": float(len(data))}

        def _forward_collect(self, data):
            return {}

    policy = Mixed({}, model=torch.nn.Linear(1, 1), enable_field=["learn"])
    assert policy.learn_mode.get_attribute("batch_size") == {"expert": 2, "own": 3}
    cfg = {"train_iterations": 2, "hook": {"save_ckpt_after_run": False}}
    for num_workers in (0, 2):
        with BaseLearner({**cfg, "dataloader": {"num_workers": num_workers}}, policy) as learner:
            learner.get_data = get_data
            learner.setup_dataloader()
            learner.start()
            assert learner.monitor.latest("total_loss") == 5.0
    assert all(size == {"expert": 2, "own": 3} for size in asked)
