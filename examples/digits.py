"""Supervised learning with the classic workers: a learner, and an evaluator with a metric.

Behavior cloning is supervised classification, so BCPolicy learns to read the handwritten digits of
scikit-learn: its observations are images, its actions the digits.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from dmiddleware.data import as_tree, load_checkpoint
from dmiddleware.policy import BCPolicy
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from dmiddleware.worker import BaseLearner, IMetric, MetricSerialEvaluator


class Accuracy(IMetric):
    """The fraction of digits that are read correctly."""

    def eval(self, inputs: Any, label: torch.Tensor) -> dict[str, float]:
        """Return the fraction in one batch."""
        return {"accuracy": float((inputs["action"] == label).float().mean())}

    def reduce_mean(self, inputs: list[dict[str, float]]) -> dict[str, float]:
        """Return the mean over batches, which all have the same size."""
        return {"accuracy": sum(one["accuracy"] for one in inputs) / len(inputs)}

    def gt(self, metric1: dict[str, float], metric2: dict[str, float] | None) -> bool:
        """Return whether the first is at least as good."""
        return metric2 is None or metric1["accuracy"] >= metric2["accuracy"]


def digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return digits for training (1149), to choose the best classifier (288), and held out (360).

    A digit is an image ``[64] float32`` in [0, 1] and its label, int64.
    """
    data = load_digits()
    images = torch.from_numpy(data.data / 16).float()
    labels = torch.from_numpy(data.target)
    rest, held_out = _split(list(range(len(labels))), labels, seed)
    train, validation = _split(rest, labels, seed)
    parts = [TensorDataset(images[part], labels[part]) for part in (train, validation, held_out)]
    return parts[0], parts[1], parts[2]


def _split(rows: list[int], labels: torch.Tensor, seed: int) -> list[list[int]]:
    """Put a fifth of the rows aside, with the same share of every digit."""
    parts: list[list[int]] = train_test_split(
        rows, test_size=0.2, stratify=labels[rows], random_state=seed
    )
    return parts


def make_policy(seed: int = 0) -> BCPolicy:
    """Build a classifier with two hidden layers."""
    return BCPolicy(
        {
            "seed": seed,
            "model": {
                "obs_shape": 64,
                "action_shape": 10,
                "action_space": "discrete",
                "encoder_hidden_sizes": [256, 256],
                "activation": "relu",
            },
            "learning_rate": 1e-3,
            "label_smoothing": 0.1,
        }
    )


def main(seed: Whole = 0, exp_name: str = "runs/digits", epochs: Count = 20) -> float:
    """Learn to read digits, and return the accuracy of the best classifier on held-out ones.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run.
        epochs: passes over the digits.
    """
    train_data, validation, held_out = digits(seed)
    generator = torch.Generator().manual_seed(seed)
    train = DataLoader(train_data, batch_size=32, shuffle=True, generator=generator)
    policy = make_policy(seed)
    learner = BaseLearner({}, policy.learn_mode, exp_name=exp_name)
    evaluator = MetricSerialEvaluator(
        {"eval_freq": 100},
        (DataLoader(validation, batch_size=36), Accuracy()),
        policy.eval_mode,
        exp_name=exp_name,
    )
    with learner, evaluator:
        learner.call_hook("before_run")
        for _ in range(epochs):
            for images, labels in train:
                if evaluator.should_eval(learner.train_iter):
                    evaluator.eval(learner.save_checkpoint, learner.train_iter)
                learner.train(as_tree({"obs": images, "action": labels}))
        evaluator.eval(learner.save_checkpoint, learner.train_iter)
        learner.call_hook("after_run")
        best = load_checkpoint(f"{exp_name}/ckpt_learner/ckpt_best.safetensors")
        policy.eval_mode.load_state_dict(best)
        evaluator.reset_env((DataLoader(held_out, batch_size=36), Accuracy()))
        _, metric = evaluator.eval()
    accuracy = float(metric["accuracy"])
    print(f"accuracy on held-out digits: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    run_program(main)
