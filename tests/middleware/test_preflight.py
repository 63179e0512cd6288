"""Mistakes in whole chains of stock middleware, each refused before the first step."""

from pathlib import Path
from typing import Any

import pytest

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.pipeline import Task, middleware
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.schedule import Schedule
from middleware import (
    CkptSaver,
    EpisodeCollector,
    Experiment,
    LearningCurve,
    ModelExchanger,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    final_ctx_saver,
    gae_estimator,
    interaction_evaluator,
    nstep_reward_enhancer,
    offline_logger,
    online_logger,
)
from middleware.classic import offline_data_fetcher, offpolicy_data_fetcher, trainer

MODEL = {"encoder_hidden_sizes": [16]}


def envs(seed: int = 0) -> Any:
    return make_env_manager("CartPole-v1", env_num=2, seed=seed)


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy.for_env(envs(), seed=0, model=MODEL, batch_size=16)


@pytest.fixture
def buffer() -> TensorBuffer:
    return TensorBuffer(100, seed=0)


def refused(*chain: Any) -> str:
    """Return the message of the ChainError that running a chain raises."""
    with Task() as task:
        for one in chain:
            task.use(one)
        with pytest.raises(ChainError) as raised:
            task.run(max_step=1)
    return str(raised.value)


def test_buffer_that_nothing_fills_is_rejected(dqn: DQNPolicy, buffer: TensorBuffer) -> None:
    message = refused(
        eps_greedy_handler(dqn),
        StepCollector(dqn, envs(), n_sample=8),
        OffPolicyLearner(dqn, buffer),
    )
    assert "add DataPusher(buffer)" in message


def test_policy_that_never_explores_is_rejected(dqn: DQNPolicy, buffer: TensorBuffer) -> None:
    message = refused(
        StepCollector(dqn, envs(), n_sample=8), data_pusher(buffer), OffPolicyLearner(dqn, buffer)
    )
    assert "add EpsGreedyHandler(" in message


def test_epsilon_follows_the_schedule_of_the_policy(buffer: TensorBuffer) -> None:
    with envs() as cartpole:
        eps = Schedule.linear(0.5, 0.05, decay=500)
        policy = DQNPolicy.for_env(cartpole, eps=eps, batch_size=8)
    seen: list[float] = []
    with Task() as task:
        task.use(eps_greedy_handler(policy)).use(StepCollector(policy, envs(), n_sample=8))
        task.use(data_pusher(buffer)).use(OffPolicyLearner(policy, buffer))
        task.use(lambda ctx: seen.append(ctx.collect_kwargs["eps"])).run(max_step=2)
    assert seen == [0.5, pytest.approx(0.5 - 0.45 * 8 / 500)]


@pytest.mark.parametrize("random_steps", [0, 20])
def test_exploration_by_random_steps_or_custom_middleware_is_accepted(
    dqn: DQNPolicy, buffer: TensorBuffer, random_steps: int
) -> None:
    @middleware(writes=("collect_kwargs",))
    def explore(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs["eps"] = 0.5

    with Task() as task:
        if not random_steps:
            task.use(explore)
        task.use(StepCollector(dqn, envs(), n_sample=8, random_steps=random_steps))
        task.use(data_pusher(buffer)).use(OffPolicyLearner(dqn, buffer))
        task.check()


def test_run_that_collects_and_never_learns_is_rejected(
    dqn: DQNPolicy, buffer: TensorBuffer
) -> None:
    message = refused(StepCollector(dqn, envs(), n_sample=8), data_pusher(buffer))
    assert "nothing in the chain learns" in message
    message = refused(
        EpisodeCollector(dqn, envs(), n_episode=2),
        interaction_evaluator(dqn, envs(), n_episode=2),
    )
    assert "nothing in the chain learns" in message


def test_roles_that_are_inactive_here_count_as_part_of_the_chain(
    dqn: DQNPolicy, buffer: TensorBuffer
) -> None:
    for role in ("learner", "collector", "evaluator"):
        with Task(roles=(role,)) as task:
            task.use(eps_greedy_handler(dqn))
            task.use(StepCollector(dqn, envs(), n_sample=8))
            task.use(given_trajectories).use(data_pusher(buffer))
            task.use(OffPolicyLearner(dqn, buffer))
            task.use(interaction_evaluator(dqn, envs(), n_episode=2))
            task.check()


@middleware(writes=("trajectories",))
def given_trajectories(ctx: OnlineRLContext) -> None:
    """Fake exchange."""


def test_env_manager_of_two_middleware_is_rejected(dqn: DQNPolicy, buffer: TensorBuffer) -> None:
    shared = envs()
    message = refused(
        eps_greedy_handler(dqn),
        StepCollector(dqn, shared, n_sample=8),
        data_pusher(buffer),
        OffPolicyLearner(dqn, buffer),
        interaction_evaluator(dqn, shared, n_episode=2),
    )
    assert "StepCollector" in message
    assert "InteractionEvaluator" in message
    assert "give each its own" in message


def test_two_savers_of_one_run_folder_are_rejected(
    dqn: DQNPolicy, buffer: TensorBuffer, run: RunFolder
) -> None:
    buffer_chain = (data_pusher(buffer), OffPolicyLearner(dqn, buffer))
    start = (eps_greedy_handler(dqn), StepCollector(dqn, envs(), n_sample=8), *buffer_chain)
    message = refused(*start, CkptSaver(dqn, run), Experiment(run, dqn))
    assert "CkptSaver" in message
    assert "ckpt" in message


def test_n_step_length_that_differs_from_the_policy_is_rejected(dqn: DQNPolicy) -> None:
    three = DQNPolicy.for_env(envs(), n_step=3)
    with pytest.raises(ConfigError, match=r"n_step=3.*n_step=1"):
        OffPolicyLearner(dqn, TensorBuffer(100, n_step=3))
    one_step = TensorBuffer(100, n_step=1)
    message = refused(
        eps_greedy_handler(three),
        StepCollector(three, envs(), n_sample=8),
        data_pusher(one_step),
        OffPolicyLearner(three, one_step),
    )
    assert "n_step=3" in message
    assert "n_step=1" in message


def test_discount_that_differs_from_the_policy_is_rejected() -> None:
    policy = DQNPolicy.for_env(envs(), discount=0.5, n_step=3)
    buffer = TensorBuffer(100, n_step=3, discount=0.99)
    with pytest.raises(ConfigError, match=r"0\.99.*0\.5"):
        OffPolicyLearner(policy, buffer)
    message = refused(
        eps_greedy_handler(policy),
        StepCollector(policy, envs(), n_sample=8),
        data_pusher(buffer),
        offpolicy_data_fetcher(buffer, batch_size=8),
        trainer(policy),
    )
    assert "discount=0.99" in message


def test_buffer_takes_its_discount_and_n_step_from_the_policy() -> None:
    policy = DQNPolicy.for_env(envs(), discount=0.5, n_step=3)
    buffer = TensorBuffer(100)
    OffPolicyLearner(policy, buffer)
    assert (buffer.n_step, buffer.discount) == (3, 0.5)


def test_rows_with_n_step_returns_are_not_summed_again() -> None:
    policy = DQNPolicy.for_env(envs(), discount=0.5, n_step=3)
    buffer = TensorBuffer(100)
    with Task() as task:
        task.use(eps_greedy_handler(policy)).use(StepCollector(policy, envs(), n_sample=8))
        task.use(nstep_reward_enhancer(policy)).use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer)).run(max_step=1)
    assert buffer.n_step == 1
    assert buffer.get(buffer.index)["discount"].min() == 0.125


def test_a_learner_has_the_batch_size_and_epochs_of_its_policy() -> None:
    policy = PPOPolicy.for_env(envs(), batch_size=16, epoch_per_collect=3, seed=0)
    with Task() as task:
        task.use(StepCollector(policy, envs(), n_sample=32)).use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy)).run(max_step=1)
        assert task.ctx.env_step == 32
        assert task.ctx.train_iter == 6


@pytest.mark.parametrize(
    "build",
    [
        lambda value: StepCollector(value, envs(), n_sample=8),
        lambda value: EpisodeCollector(value, envs(), n_episode=8),
        lambda value: interaction_evaluator(value, envs(), n_episode=8),
        lambda value: OffPolicyLearner(value, TensorBuffer(100)),
        lambda value: OnPolicyLearner(value),
        lambda value: trainer(value),
        lambda value: gae_estimator(value),
        lambda value: CkptSaver(value, RunFolder(".")),
        lambda value: ModelExchanger(value),
        lambda value: Experiment("never-made", value),
        lambda value: StepCollector(DQNPolicy.for_env(envs()), value, n_sample=8),
        lambda value: interaction_evaluator(DQNPolicy.for_env(envs()), value, n_episode=8),
        lambda value: OffPolicyLearner(DQNPolicy.for_env(envs()), value),
        lambda value: CkptSaver(DQNPolicy.for_env(envs()), value),
        lambda value: data_pusher(value),
        lambda value: online_logger(value),
        lambda value: offline_logger(value),
        lambda value: LearningCurve(value),
        lambda value: final_ctx_saver(value),
        lambda value: SnapshotSaver(value),
        lambda value: offline_data_fetcher(value, batch_size=8),
    ],
)
def test_argument_of_a_wrong_type_is_rejected_at_construction(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="got"):
        build("runs/x")
    assert not list(tmp_path.iterdir())


def test_policy_is_accepted_for_each_of_its_modes(dqn: DQNPolicy, run: RunFolder) -> None:
    buffer = TensorBuffer(100, seed=0)
    with Task() as task:
        task.use(eps_greedy_handler(dqn)).use(StepCollector(dqn, envs(), n_sample=40))
        task.use(data_pusher(buffer)).use(OffPolicyLearner(dqn, buffer))
        task.use(interaction_evaluator(dqn, envs(1), n_episode=2)).use(CkptSaver(dqn, run))
        task.run(max_step=2)
        assert task.ctx.train_iter == 2
    assert (run.ckpt_dir / "final.safetensors").exists()
