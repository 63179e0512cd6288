from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dmiddleware.classic import Policy, get_policy_cls
from dmiddleware.errors import ConfigError
from dmiddleware.policy import BCPolicy
from dmiddleware.worker import IMetric, MetricSerialEvaluator, create_serial_evaluator

ROOT = Path(__file__).parents[4]


class Accuracy(IMetric):
    def eval(self, inputs, label):
        return {"accuracy": float((inputs["action"] == label).float().mean()), "name": "digits"}

    def reduce_mean(self, inputs):
        return {"accuracy": sum(one["accuracy"] for one in inputs) / len(inputs), "name": "digits"}

    def gt(self, metric1, metric2):
        return metric2 is None or metric1["accuracy"] >= metric2["accuracy"]


Predicting = namedtuple("Predicting", ["forward", "reset"])


def sign(inputs):
    return {"action": (inputs > 0).long().squeeze(-1)}


def loader(*numbers, label=1, batch_size=2):
    values = torch.tensor(numbers, dtype=torch.float32).unsqueeze(-1)
    data = TensorDataset(values, torch.full((len(numbers),), label))
    return DataLoader(data, batch_size=batch_size)


@pytest.fixture
def evaluator(tmp_path):
    made = []

    def make(*numbers, policy=None, **cfg):
        policy = Predicting(sign, lambda data_id=None: None) if policy is None else policy
        made.append(
            MetricSerialEvaluator(
                cfg, (loader(*numbers), Accuracy()), policy, exp_name=str(tmp_path)
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_metric_of_all_batches_is_averaged_and_logged(evaluator, tmp_path):
    worker = evaluator(1, 1, 1, -1)
    stop, metric = worker.eval(train_iter=5)
    assert not stop
    assert metric == {"accuracy": 0.75, "name": "digits"}
    text = (tmp_path / "log" / "evaluator" / "evaluator_logger.txt").read_text()
    assert "accuracy" in text
    assert "0.75" in text
    assert list((tmp_path / "log" / "evaluator").glob("events.*"))


def test_a_policy_predicts_batches(evaluator):
    model = {"obs_shape": 1, "action_shape": 2, "action_space": "discrete"}
    worker = evaluator(0.5, -0.5, policy=BCPolicy({"model": model}))
    worker.reset_policy()
    assert 0.0 <= worker.eval()[1]["accuracy"] <= 1.0


def test_the_best_metric_is_saved(evaluator):
    saved = []
    worker = evaluator(1, -1)
    assert worker.best_metric is None
    worker.eval(saved.append)
    assert saved == ["ckpt_best.safetensors"]
    worker.reset_env((loader(-1, -1), Accuracy()))
    worker.eval(saved.append)
    assert len(saved) == 1
    assert worker.best_metric["accuracy"] == 0.5
    worker.reset_env((loader(1, 1), Accuracy()))
    worker.eval(saved.append)
    assert len(saved) == 2
    worker.reset()
    assert worker.best_metric is None


def test_it_stops_at_a_metric_after_training(evaluator):
    worker = evaluator(1, -1, stop_value={"accuracy": 0.5})
    assert not worker.eval(train_iter=0)[0]
    assert worker.eval(train_iter=1)[0]
    assert not evaluator(-1, stop_value={"accuracy": 0.5}).eval(train_iter=1)[0]
    assert not evaluator(1).eval(train_iter=1)[0]


def test_its_state_can_be_restored(evaluator):
    worker, other = evaluator(1, -1), evaluator(1, -1)
    worker.should_eval(50)
    worker.eval()
    other.load_state_dict(worker.state_dict())
    assert other.best_metric == worker.best_metric
    assert not other.should_eval(60)
    assert other.should_eval(100)


def test_a_metric_may_be_a_single_number(tmp_path):
    class Mean(Accuracy):
        def reduce_mean(self, inputs):
            return torch.tensor(0.25)

    policy = Predicting(sign, print)
    worker = MetricSerialEvaluator({}, (loader(1), Mean()), policy, exp_name=str(tmp_path))
    assert float(worker.eval()[1]) == 0.25
    worker.close()


def test_what_does_not_fit_is_refused(evaluator):
    with pytest.raises(ConfigError, match=r"env=\(loader, metric\)"):
        MetricSerialEvaluator({}, loader(1))
    with pytest.raises(ConfigError, match=r"env=\(loader, metric\)"):
        MetricSerialEvaluator({}, (loader(1), max))
    with pytest.raises(ConfigError, match="eval_mode"):
        evaluator(1, policy=max)
    worker = evaluator(1)
    worker.reset_env(([], Accuracy()))
    with pytest.raises(ConfigError, match="is empty"):
        worker.eval()
    with pytest.raises(TypeError):
        IMetric()


def test_it_is_created_by_name_with_the_classic_defaults():
    worker = create_serial_evaluator({"type": "metric"})
    assert type(worker) is MetricSerialEvaluator
    assert dict(worker.default_config()) == {
        "eval_freq": 50,
        "stop_value": None,
        "multi_gpu": False,
        "log_to_file": True,
        "cfg_type": "MetricSerialEvaluatorDict",
    }


SCRIPT = """
import json, sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
from dmiddleware.worker import MetricSerialEvaluator
from tests.dmiddleware.worker.evaluator.test_metric_evaluator import (
    Accuracy, Predicting, loader, sign,
)
data = loader(1, 1, 1, -1) if rank == 0 else loader(-1)
saved, answers = [], []
for multi_gpu in (True, False):
    worker = MetricSerialEvaluator(
        {"multi_gpu": multi_gpu, "stop_value": {"accuracy": 0.7}}, (data, Accuracy()),
        Predicting(sign, print), exp_name=sys.argv[3],
    )
    answers.append(worker.eval(saved.append, train_iter=1))
    worker.close()
print(json.dumps([answers, saved]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.process
def test_ranks_average_by_rows_or_follow_the_first(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        answers = [json.loads(one.communicate(timeout=100)[0]) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    for found, _ in answers:
        # 3 of 5 rows are right, not the mean of 0.75 and 0.
        assert found[0] == [False, {"accuracy": pytest.approx(0.6), "name": "digits"}]
        assert found[1] == [True, {"accuracy": 0.75, "name": "digits"}]
    assert [len(saved) for _, saved in answers] == [2, 0]


class Classifier(Policy):
    """Classifies a batch at once, as DI-engine's policies for data sets do."""

    def _forward_eval(self, data):
        self.seen = data
        assert not torch.is_grad_enabled()
        return {"action": (self._model(data) > 0).long().squeeze(-1)}


@pytest.mark.parametrize("choose", [lambda policy: policy, lambda policy: policy.eval_mode])
def test_a_policy_of_ones_own_gets_the_batches_of_the_loader(choose, evaluator):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    policy = Classifier({}, model, enable_field=["eval"])
    _, metric = evaluator(1.0, -1.0, 2.0, policy=choose(policy)).eval()
    assert policy.seen.tolist() == [[2.0]]
    assert metric["accuracy"] == pytest.approx(0.75)


def test_a_subclass_of_a_stock_policy_gets_them_too(evaluator):
    class Stubborn(get_policy_cls({"type": "bc"})):
        def _forward_eval(self, data):
            assert data.shape[1:] == (1,)
            answer = super()._forward_eval(data)
            return {"action": torch.ones_like(answer["action"])}

    policy = Stubborn({"model": {"obs_shape": 1, "action_shape": 2}})
    assert evaluator(1.0, -1.0, policy=policy).eval()[1]["accuracy"] == 1.0
