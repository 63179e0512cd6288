"""The exchange of weights between processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware import WaitTimeout
from dmiddleware.data import as_tree, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task, middleware
from dmiddleware.policy import DQNPolicy, PPOPolicy, SACPolicy
from middleware import (
    CkptSaver,
    ContextExchanger,
    ModelExchanger,
    OnlineRLContext,
    PeriodicalModelExchanger,
    Role,
    RunFolder,
    StepCollector,
    interaction_evaluator,
)
from middleware.exchange.events import LEARNED, MODEL
from tests.middleware.nodes import DEADLINE_S, node, run_nodes
from tests.middleware.small_dqn import fill, make_policy

SHORT_S = 0.05


def values(state: Any) -> set[float]:
    return {float(one) for tensor in state["model"].values() for one in tensor.unique()}


def weights(policy: DQNPolicy) -> set[float]:
    return values(policy.eval_mode.state_dict())


def state(value: float) -> Any:
    policy = make_policy()
    fill(policy, value)
    return policy.eval_mode.state_dict()


def learning(policy: DQNPolicy) -> Any:
    @middleware(roles=[Role.LEARNER])
    def learn(ctx: OnlineRLContext) -> None:
        ctx.train_iter += 1
        fill(policy, ctx.train_iter)

    return learn


@middleware(roles=[Role.COLLECTOR])
def collect(ctx: OnlineRLContext) -> None: ...


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Task[Any]]:
    with node(tmp_path, 1, Role.COLLECTOR) as task:
        yield task


def set_up(task: Task[Any], *chain: Any) -> None:
    for one in chain:
        task.use(one)
    task.run(max_step=0)


def arrive(task: Task[Any], event: Any, *args: Any) -> None:
    task.emit(event, *args, only_local=True)
    task.sync()


def learned(train_iter: int, *, epoch: int = 1) -> dict[str, Any]:
    return {"train_iter": train_iter, "env_step": 0, "env_episode": 0, "epoch": epoch}


def test_a_follower_uses_the_newest_weights_and_their_version(
    collector: Task[Any],
) -> None:
    policy = make_policy()
    set_up(collector, ModelExchanger(policy), collect)
    arrive(collector, MODEL, learned(3, epoch=1), state(3))
    arrive(collector, MODEL, learned(5, epoch=1), state(5))
    collector.run(max_step=1)
    assert (weights(policy), collector.ctx.train_iter) == ({5.0}, 5)


def test_older_weights_do_not_replace_newer_ones(collector: Task[Any]) -> None:
    policy = make_policy()
    set_up(collector, ModelExchanger(policy), collect)
    arrive(collector, MODEL, learned(5, epoch=1), state(5))
    arrive(collector, MODEL, learned(4, epoch=1), state(4))
    collector.run(max_step=1)
    assert weights(policy) == {5.0}


def test_weights_of_a_restarted_learner_replace_those_with_more_updates(
    collector: Task[Any],
) -> None:
    policy = make_policy()
    set_up(collector, ModelExchanger(policy, max_policy_lag=1, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, learned(900, epoch=1))
    arrive(collector, MODEL, learned(900, epoch=1), state(9))
    collector.run(max_step=1)
    arrive(collector, LEARNED, learned(5, epoch=2))
    arrive(collector, MODEL, learned(5, epoch=2), state(5))
    collector.run(max_step=1)
    assert (weights(policy), collector.ctx.train_iter) == ({5.0}, 5)


@pytest.mark.parametrize("max_policy_lag", [None, 1])
def test_late_weights_of_an_earlier_learner_are_ignored(
    collector: Task[Any], max_policy_lag: int | None
) -> None:
    policy = make_policy()
    set_up(collector, ModelExchanger(policy, max_policy_lag=max_policy_lag), collect)
    arrive(collector, MODEL, learned(5, epoch=2), state(5))
    arrive(collector, MODEL, learned(900, epoch=1), state(9))
    collector.run(max_step=1)
    assert (weights(policy), collector.ctx.train_iter) == ({5.0}, 5)


def test_weights_of_an_earlier_learner_are_not_new_enough(collector: Task[Any]) -> None:
    exchange = ModelExchanger(make_policy(), max_policy_lag=10, timeout_s=SHORT_S)
    set_up(collector, exchange, collect)
    arrive(collector, MODEL, learned(900, epoch=1), state(9))
    arrive(collector, LEARNED, learned(5, epoch=2))
    with pytest.raises(WaitTimeout, match="recent weights"):
        collector.run(max_step=1)


def test_a_follower_waits_for_its_first_weights(collector: Task[Any]) -> None:
    collector.use(ModelExchanger(make_policy(), timeout_s=SHORT_S)).use(collect)
    with pytest.raises(WaitTimeout, match="weights of the learner did not arrive"):
        collector.run(max_step=1)


def test_a_follower_does_not_wait_for_a_learner_that_has_ended(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> None:
        policy = make_policy()
        task.use(ModelExchanger(policy, every_train_iter=2)).use(learning(policy)).run(max_step=1)

    def run_collector(task: Task[Any]) -> Any:
        exchange = ModelExchanger(make_policy(), max_policy_lag=2)
        task.use(exchange).use(collect)
        task.run(max_step=0)
        # The learner has made further updates, and will never publish their weights.
        arrive(task, LEARNED, learned(9, epoch=1000))
        task.run()
        return task.stop_reason

    _, reason = run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_collector))
    assert reason == "the learner has ended"


def test_a_follower_that_is_too_far_behind_waits_for_newer_weights(collector: Task[Any]) -> None:
    policy = make_policy()
    set_up(collector, ModelExchanger(policy, max_policy_lag=4, timeout_s=SHORT_S), collect)
    arrive(collector, LEARNED, learned(10))
    arrive(collector, MODEL, learned(5, epoch=1), state(5))
    with pytest.raises(WaitTimeout, match="recent weights"):
        collector.run(max_step=1)
    arrive(collector, MODEL, learned(6, epoch=1), state(6))
    collector.run(max_step=1)
    assert collector.ctx.train_iter == 6
    assert "exchange/blocked_for_weights_s" in collector.ctx.logged


def published(task: Task[Any], exchange: ModelExchanger, n_steps: int) -> list[int]:
    """Run a learner, and return the versions that a peer received."""
    with task:
        versions: list[int] = []
        emit = task.emit

        def record(event: Any, *args: Any, **kwargs: Any) -> None:
            if event == MODEL:
                versions.append(args[0]["train_iter"])
            emit(event, *args, **kwargs)

        task.emit = record  # type: ignore[method-assign]
        task.use(exchange).use(learning(make_policy())).run(max_step=n_steps)
        return versions


def test_a_learner_publishes_at_the_start_and_after_each_update(tmp_path: Path) -> None:
    with node(tmp_path, 0, Role.LEARNER) as task:
        assert published(task, ModelExchanger(make_policy()), 3) == [0, 1, 2, 3]


def test_weights_are_published_at_the_given_period(tmp_path: Path) -> None:
    with node(tmp_path, 0, Role.LEARNER) as task:
        assert published(task, PeriodicalModelExchanger(make_policy(), period=3), 7) == [0, 3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_train_iter": 0}, "every_train_iter must be an integer ≥ 1"),
        ({"max_policy_lag": 0}, "max_policy_lag must be an integer ≥ 1"),
        ({"every_train_iter": 5, "max_policy_lag": 4}, "at least every_train_iter"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelExchanger(make_policy(), **options)


def test_in_one_process_nothing_is_exchanged() -> None:
    policy = make_policy()
    with Task(OnlineRLContext()) as task:
        task.use(ModelExchanger(policy)).use(learning(policy)).run(max_step=2)
        assert task.ctx.logged == {}


def test_rows_have_the_version_of_their_policy_and_the_best_policy_is_the_evaluated_one(
    tmp_path: Path,
) -> None:
    stop_at = 4
    changed = threading.Condition()
    learner_at = [0]

    def run_learner(task: Task[Any]) -> Any:
        policy = make_policy()
        stamps: list[tuple[int, int]] = []

        @middleware(roles=[Role.LEARNER])
        def look(ctx: OnlineRLContext) -> None:
            rows = ctx.trajectories["collect_iter"]
            assert int(rows.min()) == int(rows.max())
            stamps.append((int(rows.max()), ctx.train_iter))
            with changed:
                learner_at[0] = ctx.train_iter
                changed.notify_all()

        with RunFolder.create("run", root=tmp_path) as run:
            task.use(CkptSaver(policy.learn_mode, run))
            chain(task, policy).use(look).use(learning(policy)).run()
            return stamps, task.ctx.train_iter, load_checkpoint(run.best_ckpt)

    def chain(task: Task[Any], policy: DQNPolicy) -> Task[Any]:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=task.seed_for("envs"))
        task.use(ContextExchanger(max_ahead=2)).use(ModelExchanger(policy))
        task.use(StepCollector(policy.collect_mode, envs, n_sample=4))
        return task

    def run_collector(task: Task[Any]) -> Any:
        policy = make_policy()
        chain(task, policy).use(learning(policy)).run()
        return weights(policy)

    def run_evaluator(task: Task[Any]) -> Any:
        policy = make_policy()

        @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
        def judge(ctx: OnlineRLContext) -> None:
            # Later evaluations are better, so the last one is the best.
            assert weights(policy) == {float(ctx.train_iter)} or ctx.train_iter == 0
            ctx.eval_value = ctx.last_eval_value = float(ctx.train_iter)
            ctx.last_eval_iter = ctx.train_iter
            ctx.eval_output = {"policy_state": policy.eval_mode.state_dict()}
            if ctx.train_iter >= stop_at:
                task.stop("good enough")
                with changed:  # by now the learner is further
                    assert changed.wait_for(lambda: learner_at[0] > ctx.train_iter, DEADLINE_S)

        task.use(ContextExchanger()).use(ModelExchanger(policy)).use(judge).run()
        return task.ctx.last_eval_iter

    (stamps, train_iter, best), _, judged = run_nodes(
        tmp_path,
        (Role.LEARNER, run_learner),
        (Role.COLLECTOR, run_collector),
        (Role.EVALUATOR, run_evaluator),
    )
    assert judged >= stop_at
    assert train_iter > judged
    assert best["last_iter"] == judged
    assert values(best) == {float(judged)}
    assert all(version <= now for version, now in stamps)
    assert stamps == sorted(stamps)


def test_an_evaluation_without_its_parameters_saves_no_other_policy_as_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_policy()

    @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
    def tell(ctx: OnlineRLContext) -> None:
        ctx.eval_value, ctx.eval_output = 1.0, {"node_id": 3}

    with RunFolder.create("run", root=tmp_path) as run, Task(OnlineRLContext()) as task:
        saver = CkptSaver(policy.learn_mode, run)
        task.use(tell).use(saver).run(max_step=1)
        assert not run.best_ckpt.exists()
        assert "came without its parameters" in caplog.text
        assert saver.best_value == float("-inf")


def test_collectors_explore_differently_and_have_distinct_episode_ids(tmp_path: Path) -> None:
    def draws(node_id: int) -> tuple[list[float], int]:
        policy = make_policy()
        with node(tmp_path, node_id, Role.COLLECTOR) as task:
            envs = make_env_manager("CartPole-v1", env_num=1, seed=task.seed_for("collector"))
            collector = StepCollector(policy.collect_mode, envs, n_sample=2)
            set_up(task, collector)
            task.run(max_step=1)
            rows = task.ctx.trajectories
            generator = policy.generator
            return torch.rand(2, generator=generator).tolist(), int(rows["episode_id"][0, 0])

    (one, first), (two, second) = draws(1), draws(2)
    assert one != two
    assert first >> 32 != second >> 32


def test_the_stock_evaluator_keeps_the_parameters_that_it_evaluated(tmp_path: Path) -> None:
    policy = make_policy()
    with node(tmp_path, 2, Role.EVALUATOR) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=task.seed_for("evaluator"))
        evaluator = interaction_evaluator(policy.eval_mode, envs, n_episode=2)
        set_up(task, ModelExchanger(policy), evaluator)
        arrive(task, MODEL, learned(3), state(0.5))
        task.run(max_step=1)
        assert task.ctx.last_eval_iter == 3
        assert values(task.ctx.eval_output["policy_state"]) == {0.5}


def test_observation_statistics_come_from_the_collectors_data(tmp_path: Path) -> None:
    def make() -> PPOPolicy:
        return PPOPolicy(
            {"seed": 0, "obs_norm": True, "model": {"obs_shape": 4, "action_shape": 2}}
        )

    alone, policy, elsewhere = make(), make(), make()
    obs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1

    @middleware(roles=[Role.LEARNER])
    def learn(ctx: OnlineRLContext) -> None: ...

    def receive(ctx: OnlineRLContext) -> None:
        ctx.trajectories = as_tree({"obs": obs})

    with node(tmp_path, 0, Role.LEARNER) as task:
        task.use(receive).use(ModelExchanger(policy)).use(learn).run(max_step=2)
    for _ in range(2):
        alone.collect_mode.forward(obs.flatten(0, 1))
    elsewhere.eval_mode.load_state_dict(policy.eval_mode.state_dict())
    for one in (policy, elsewhere):
        found = one.eval_mode.state_dict()["acting"]["obs_norm"]["running"]
        expected = alone.eval_mode.state_dict()["acting"]["obs_norm"]["running"]
        for path, stats in expected.items():
            assert all(stats[name].allclose(found[path][name]) for name in ("mean", "var"))
            assert not stats["mean"].equal(torch.zeros(4))


def test_a_broadcast_of_sac_has_the_size_of_its_actor(tmp_path: Path) -> None:
    def n_bytes(policy: SACPolicy, part: str) -> int:
        module = policy.components[part].module
        return sum(4 * parameter.numel() for parameter in module.parameters())

    def run_learner(task: Task[Any]) -> Any:
        policy = SACPolicy.for_env(gym.make("Pendulum-v1"), seed=0)

        @middleware(roles=[Role.LEARNER])
        def learn(ctx: OnlineRLContext) -> None:
            ctx.train_iter += 1

        task.use(ModelExchanger(policy)).use(learn).run()
        traffic = task.router.traffic()[MODEL.name]  # type: ignore[union-attr]
        assert traffic.sent > 0
        one = traffic.sent_bytes / traffic.sent
        return one, n_bytes(policy, "actor"), n_bytes(policy, "critic")

    def run_collector(task: Task[Any]) -> Any:
        policy = SACPolicy.for_env(gym.make("Pendulum-v1"), seed=1)
        versions: set[int] = set()

        @middleware(roles=[Role.COLLECTOR])
        def stop(ctx: OnlineRLContext) -> None:
            versions.add(ctx.train_iter)
            # The first may have been sent before this node subscribed, and is then not counted.
            if len(versions) > 1:
                task.stop("newer weights have arrived")

        task.use(ModelExchanger(policy)).use(stop).run()
        traffic = task.router.traffic()[MODEL.name]  # type: ignore[union-attr]
        return traffic.received_bytes / traffic.received

    (sent, actor, critic), received = run_nodes(
        tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_collector)
    )
    assert (actor, critic) == (269_320, 538_632)
    for size in (sent, received):
        # The rest are the names of the tensors, their shapes, and the bounds of the actions.
        assert actor <= size < 1.02 * actor
