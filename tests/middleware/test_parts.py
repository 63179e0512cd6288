"""Several policies in one chain, each in a named part of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dmiddleware import load_policy
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, CheckpointMismatch, ConfigError, RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy, DQNSettings, Policy, PPOPolicy
from dmiddleware.rl import Schedule
from dmiddleware.runs.metrics_file import MetricsFile
from dmiddleware.runs.record import RunRecord
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    GAEEstimator,
    InteractionEvaluator,
    OffPolicyLearner,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)
from middleware.curriculum import Curriculum
from middleware.evaluate import evaluation_prefixes

SMALL = {"encoder_hidden_sizes": [8]}


def envs(name: str) -> Any:
    return make_env_manager(name, env_num=2, seed=0)


class Part:
    """A policy, and the middleware that learn it.

    Args:
        policy: the policy.
        middleware: in the order of the chain.
    """

    def __init__(self, policy: Policy, *middleware: Any) -> None:
        self.policy, self.middleware = policy, middleware

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.policy.model.parameters()]


def dqn(name: str | None, *, eps: Any = 0.5) -> Part:
    settings = DQNSettings(eps=eps, model=SMALL, batch_size=8)
    policy = DQNPolicy.for_env(envs("CartPole-v1"), settings, seed=1)
    buffer = TensorBuffer(500, seed=2)
    return Part(
        policy,
        EpsGreedyHandler(policy, name=name),
        StepCollector(policy, envs("CartPole-v1"), n_sample=16, random_steps=32, name=name),
        DataPusher(buffer, name=name),
        OffPolicyLearner(policy, buffer, update_per_collect=2, name=name),
        InteractionEvaluator(
            policy, envs("CartPole-v1"), n_episode=2, every_train_iter=10, name=name
        ),
    )


def ppo(name: str | None) -> Part:
    policy = PPOPolicy.for_env(
        envs("Pendulum-v1"), model=SMALL, seed=3, batch_size=16, epoch_per_collect=2
    )
    return Part(
        policy,
        StepCollector(policy, envs("Pendulum-v1"), n_sample=32, name=name),
        GAEEstimator(policy, name=name),
        OnPolicyLearner(policy, name=name),
    )


def train(*parts: Part, max_step: int = 12, extra: Any = ()) -> Any:
    with Task(seed=4) as task:
        for part in parts:
            for component in part.middleware:
                task.use(component)
        for component in extra:
            task.use(component)
        task.run(max_step=max_step)
    return task.ctx


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_two_policies_in_one_chain_learn_what_they_learn_alone() -> None:
    alone, beside = (dqn(None), ppo(None)), (dqn("red"), ppo("blue"))
    whole = [train(part) for part in alone]
    ctx = train(*beside)
    for single, part in zip(alone, beside, strict=True):
        assert equal(single.weights(), part.weights())
    counters = [(part.env_step, part.env_episode, part.train_iter) for part in ctx.parts.values()]
    assert counters == [(part.env_step, part.env_episode, part.train_iter) for part in whole]
    assert (ctx.env_step, ctx.train_iter) == tuple(sum(n) for n in zip(*counters, strict=True))[::2]
    assert ctx.part("red").last_eval_value == whole[0].last_eval_value


def run_in(folder: RunFolder, *, max_step: int) -> tuple[Part, Part]:
    """Train both policies with all records, from the newest snapshot of the folder."""
    red, blue = dqn("red"), ppo("blue")
    policies = {"red": red.policy, "blue": blue.policy}
    with Task(seed=4) as task:
        snapshots = SnapshotSaver(folder, every_train_iter=1)
        for part in (red, blue):
            for component in part.middleware:
                task.use(component)
        task.use(Experiment(folder, policies, every_env_step=100, n_fresh_episode=2))
        task.use(snapshots)
        snapshots.resume(task)
        task.run(max_step=max_step)
        snapshots.save(task)
    return red, blue


def learn_alone(
    folder: Path, name: str, *, max_step: int, extra: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """Train one of the parts, as a process of its own does, from the newest snapshot.

    Args:
        folder: where it is saved.
        name: the part.
        max_step: steps from there.
        extra: makes a further middleware, given the policies.
    """
    parts = {"red": dqn("red"), "blue": ppo("blue")}
    roles = ["learner", "collector", *(["evaluator"] if name == "red" else [])]
    with Task(seed=4, roles=[f"{role}:{name}" for role in roles]) as task:
        snapshots = SnapshotSaver(folder, every_train_iter=3)
        if extra is not None:
            task.use(extra({name: part.policy for name, part in parts.items()}))
        for part in parts.values():
            for component in part.middleware:
                task.use(component)
        task.use(snapshots)
        snapshots.resume(task)
        task.run(max_step=max_step)
        snapshots.save(task)
    return parts[name].weights()


def test_learners_in_processes_of_their_own_resume_exactly(tmp_path: Path) -> None:
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    for folder in (halves, whole):
        folder.mkdir()
    half = {name: learn_alone(halves, name, max_step=6) for name in ("red", "blue")}
    for name, before in half.items():
        resumed = learn_alone(halves, name, max_step=6)
        assert equal(resumed, learn_alone(whole, name, max_step=12))
        assert not equal(resumed, before)
        assert list((halves / "snapshots" / name).glob("step_*"))
    assert not list((halves / "snapshots").glob("step_*"))


def test_a_learner_in_a_process_of_its_own_evaluates_its_policy_at_the_end(tmp_path: Path) -> None:
    def record(policies: dict[str, Policy]) -> Experiment:
        return Experiment("alone", policies, root=tmp_path, n_fresh_episode=3)

    learn_alone(tmp_path, "red", max_step=6, extra=record)
    run = tmp_path / "alone"
    (name,) = result = json.loads((run / "result.json").read_text())["parts"]
    assert (name, result["red"]["n_episode"]) == ("red", 3)
    assert result["red"]["evaluations"]
    assert (run / "curve.png").exists()
    assert json.loads((run / "final_ctx.json").read_text())["parts"]["red"]["train_iter"] == 12


def test_a_snapshot_of_other_learners_is_refused(tmp_path: Path) -> None:
    with Task(seed=4) as task:
        snapshots = SnapshotSaver(tmp_path)
        task.use(snapshots)
        for part in (dqn("red"), ppo("blue")):
            for component in part.middleware:
                task.use(component)
        task.run(max_step=1)
        path = snapshots.save(task)
    with Task(seed=4, roles=["learner:blue", "collector:blue"]) as task:
        snapshots = SnapshotSaver(tmp_path)
        task.use(snapshots)
        for part in (dqn("red"), ppo("blue")):
            for component in part.middleware:
                task.use(component)
        with pytest.raises(CheckpointMismatch, match=r"learned red and blue.*one learns blue"):
            snapshots.resume(task, path)


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was resumed half way."""
    root = tmp_path_factory.mktemp("runs")
    parts = run_in(RunFolder.create("halves", root=root), max_step=6)
    resumed = run_in(RunFolder.create("halves", root=root, resume=True), max_step=6)
    whole = dqn("red"), ppo("blue")
    train(*whole)
    for part, single, before in zip(resumed, whole, parts, strict=True):
        assert equal(part.weights(), single.weights())
        assert not equal(part.weights(), before.weights())
    return root / "halves"


def test_a_resumed_run_keeps_the_parts_apart(run_path: Path) -> None:
    final = json.loads((run_path / "final_ctx.json").read_text())
    red, blue = final["parts"]["red"], final["parts"]["blue"]
    assert final["env_step"] == red["env_step"] + blue["env_step"] == 208 + 384
    assert red["train_iter"] == 24


def test_the_metrics_of_a_part_begin_with_its_name(run_path: Path) -> None:
    rows = MetricsFile(run_path / "metrics.jsonl").rows()
    names = {name for row in rows for name in row}
    assert {"red/collect/eps", "red/learn/total_loss", "blue/learn/explained_variance"} <= names
    assert {"red/env_step", "blue/train_iter", "red/eval/return_mean"} <= names
    assert not any(name.startswith(("collect/", "learn/", "eval/")) for name in names)
    assert all(row["env_step"] == row["red/env_step"] + row["blue/env_step"] for row in rows)


def test_each_part_has_its_own_checkpoints(run_path: Path) -> None:
    files = {str(path.relative_to(run_path / "ckpt")) for path in run_path.glob("ckpt/**/*.s*")}
    assert files == {
        "red/best.safetensors", "red/final.safetensors", "blue/final.safetensors",
    }  # fmt: skip
    assert load_policy(run_path, name="red")(torch.zeros(4)) in (0, 1)
    assert load_policy(run_path, name="blue")(torch.zeros(3)).shape == (1,)
    with pytest.raises(RunFolderError, match=r"those of blue, red: load one of them with name="):
        load_policy(run_path)
    with pytest.raises(RunFolderError, match=r"has no policy 'green'"):
        load_policy(run_path, name="green")
    with pytest.raises(RunFolderError, match=r"leave out name='red'"):
        load_policy(run_path / "ckpt" / "red" / "best.safetensors", name="red")


def test_the_result_has_the_outcome_of_each_part(run_path: Path) -> None:
    result = json.loads((run_path / "result.json").read_text())
    assert result["mean_return"] is None
    red = result["parts"]["red"]
    assert (red["n_episode"], red["train_iter"]) == (2, 24)
    assert [at for at, _ in red["evaluations"]] == sorted(at for at, _ in red["evaluations"])
    assert all(at <= red["env_step"] for at, _ in red["evaluations"])
    assert result["parts"]["blue"]["n_episode"] == 0


def test_a_metric_of_a_part_is_reported_over_the_counters_of_the_part(run_path: Path) -> None:
    record = RunRecord.load(run_path, "red/eval/return_mean")
    assert record.n_steps == 208
    with pytest.raises(RunFolderError, match=r"did you mean red/eval/return_mean"):
        RunRecord.load(run_path)


def test_the_limit_of_a_part_counts_in_the_part() -> None:
    part, limit = dqn("red"), TerminationChecker(max_train_iter=6, name="red")
    ctx = train(part, ppo("blue"), max_step=100, extra=[limit])
    assert ctx.part("red").train_iter == 6
    assert ctx.task.stop_reason == "train_iter of red reached 6 (max_train_iter is 6)"
    ctx = train(dqn("red"), ppo("blue"), max_step=100, extra=[TerminationChecker(max_env_step=200)])
    assert 200 <= ctx.env_step < 200 + 48


@pytest.mark.parametrize("limited", ["red", None])
def test_a_schedule_by_progress_follows_the_limit_that_is_nearest(limited: str | None) -> None:
    part = dqn("red", eps=Schedule.linear(1.0, 0.0, by="progress"))
    limit = TerminationChecker(max_env_step=320, name=limited)
    ctx = train(part, ppo("blue"), max_step=5, extra=[limit])
    eps = ctx.part("red").logged["collect/eps"]
    # The steps collected when the last step began: 32 and 3 * 16 steps, and 4 * 32 of the other.
    assert eps == pytest.approx(1 - (80 if limited else 80 + 128) / 320)


def named(part: Part, kind: Any, name: str | None) -> Part:
    """Return the part with one middleware in another part."""
    for component in part.middleware:
        if isinstance(component, kind):
            component.settings = type(component.settings)(
                **{**vars(component.settings), "name": name}
            )
    return part


def without(part: Part, kind: type) -> Part:
    part.middleware = tuple(c for c in part.middleware if not isinstance(c, kind))
    return part


REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "two learners without names": (
        lambda: [dqn(None), ppo(None)],
        r"OnPolicyLearner\): it learns another policy than the OffPolicyLearner before it, and "
        r"both have no name.*give each policy a name",
    ),
    "one name for two learners": (
        lambda: [dqn("red"), ppo("red")],
        r"both have the name 'red'.*give each policy a name",
    ),
    "a learner of another part": (
        lambda: [named(ppo("blue"), OnPolicyLearner, "red")],
        r"reads ctx.train_data in the part 'red', which no middleware writes there; it is written "
        r"by middleware 2 \(GAEEstimator:blue\) in the part 'blue'.*name='red'",
    ),
    "a learner without a name": (
        lambda: [named(ppo("blue"), OnPolicyLearner, None)],
        r"give one of them no name, or the reader the name of its writer",
    ),
    "an estimator without a collector": (
        lambda: [without(ppo("blue"), StepCollector)],
        r"reads ctx.trajectories in the part 'blue', which.*with name='blue' before it",
    ),
    "a collector whose data nobody reads": (
        lambda: [named(dqn("red"), StepCollector, "rad")],
        r"StepCollector:rad\): it collects data for the part 'rad', but nothing of that part reads",
    ),
    "a limit of a part that is not there": (
        lambda: [ppo("blue"), Part(ppo(None).policy, TerminationChecker(max_env_step=1, name="x"))],
        r"TerminationChecker:x\) has the name 'x', but nothing with that name writes ctx.env_step "
        r"or ctx.train_iter; give it the name.*name='blue', or none",
    ),
    "two evaluators of a part": (
        lambda: [dqn("red"), Part(ppo(None).policy, dqn("red").middleware[-1])],
        r"the part 'red' of the chain has another evaluator",
    ),
    "a curriculum with the name of a part": (
        lambda: [
            dqn("red"),
            Part(
                ppo(None).policy,
                Curriculum(lambda ctx, now: None, envs("CartPole-v1"), name="red"),
            ),
        ],
        r"the metrics of the Curriculum begin with 'red' too",
    ),
    "an experiment that records no part": (
        lambda: [dqn("red"), "record"],
        r"it records a policy without a name, but the chain learns that of 'red'; give it each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_ambiguous_chain_is_refused_with_its_remedy(case: str, tmp_path: Path) -> None:
    build, message = REFUSED[case]
    parts = build()
    with Task() as task:
        for part in parts:
            if part == "record":
                folder = RunFolder.create("x", root=tmp_path)
                task.use(Experiment(folder, parts[0].policy))
                continue
            for component in part.middleware:
                task.use(component)
        with pytest.raises(ChainError, match=f"(?s){message}"):
            task.check()


def test_collectors_that_overwrite_each_other_are_refused() -> None:
    first, second = ppo(None), dqn(None)
    with Task() as task:
        task.use(first.middleware[0]).use(second.middleware[1])
        for component in first.middleware[1:]:
            task.use(component)
        with pytest.raises(ChainError, match=r"replaces ctx.trajectories of the StepCollector"):
            task.check()


def test_collectors_whose_data_are_read_in_between_are_fine() -> None:
    part, further = dqn(None), dqn(None)
    buffer = TensorBuffer(500, seed=0)
    with Task() as task:
        task.use(further.middleware[0]).use(further.middleware[1]).use(DataPusher(buffer))
        for component in part.middleware:
            task.use(component)
        task.check()


def test_an_evaluator_of_a_part_has_metrics_of_the_part() -> None:
    with Task() as task:
        for component in (*dqn("red").middleware, *dqn(None).middleware):
            task.use(component)
        assert evaluation_prefixes(task.chain.of("red")) == ("eval",)
        assert evaluation_prefixes(task.chain.of(None)) == ("eval",)
        task.check()


def test_an_evaluator_with_a_name_of_its_own_belongs_to_the_whole_chain() -> None:
    part = dqn(None)
    windy = InteractionEvaluator(part.policy, envs("CartPole-v1"), n_episode=2, name="windy")
    ctx = train(part, extra=[windy], max_step=1)
    assert list(ctx.parts) == []
    assert ctx.other_evaluations.keys() == {"windy"}


@pytest.mark.parametrize("name", ["", "a/b", "learn", "env_step", "collect"])
def test_a_name_that_metrics_use_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name must be"):
        TerminationChecker(max_env_step=1, name=name)


def test_a_checkpoint_of_a_part_is_played_and_exported_in_its_own_env(run_path: Path) -> None:
    checkpoint = str(run_path / "ckpt" / "blue" / "final.safetensors")
    played = CliRunner().invoke(ditask, ["play", checkpoint, "--episodes", "1"])
    assert "1 episodes of Pendulum-v1" in played.output, played.output
    exported = CliRunner().invoke(ditask, ["export", checkpoint, "--format", "torch"])
    assert exported.exit_code == 0, exported.output
    card = (run_path / "export" / "blue" / "README.md").read_text()
    assert "PPO on Pendulum-v1" in card
    assert "type: ppo" in card
    assert "type: dqn" not in card
