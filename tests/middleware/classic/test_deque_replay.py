"""A DequeBuffer in a chain, and what it has in common with a TensorBuffer there."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from dmiddleware.classic import DequeBuffer, DequeReplay
from dmiddleware.classic.buffer_middleware import (
    PriorityExperienceReplay,
    use_time_check,
)
from dmiddleware.data import PrioritySampler, index_rows, to_dict
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.pipeline import middleware
from dmiddleware.policy import DQNPolicy, R2D2Policy
from dmiddleware.rl import Schedule
from middleware import (
    EpsGreedyHandler,
    OffPolicyLearner,
    OnlineRLContext,
    StepCollector,
    data_pusher,
    priority_calculator,
    termination_checker,
)
from middleware.classic import offpolicy_data_fetcher, trainer
from tests.dmiddleware.data.collecting import Collector, as_batch
from tests.middleware.classic.fresh_rows import fresh
from tests.middleware.replay_rows import FORMS, rows, write
from tests.middleware.small_dqn import filled, priorities_in_two_halves, small, transitions


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(small(16))


def deque(n: int) -> DequeReplay:
    buffer = DequeBuffer(1000, seed=0)
    batch = transitions(n)
    for number in range(n):
        buffer.push(to_dict(index_rows(batch, number)))
    return DequeReplay(buffer)


@pytest.mark.parametrize("form", FORMS)
def test_a_deque_buffer_gets_each_transition_of_every_form(run_steps: Any, form: str) -> None:
    buffer = DequeBuffer(100, seed=0)
    run_steps(write(trajectories=FORMS[form]), data_pusher(DequeReplay(buffer)))
    assert [float(item.data["obs"]) for item in buffer] == [0.0, 1.0, 2.0]


def test_deque_buffer_stores_single_rows_with_the_iteration(run_steps: Any) -> None:
    buffer = DequeBuffer(100, seed=0)
    collected = rows(3, 2, collect_iter=torch.full((3, 2), 7))
    run_steps(write(trajectories=collected), data_pusher(DequeReplay(buffer)))
    items = list(buffer)
    assert [float(item.data["obs"]) for item in items] == [0, 1, 2, 3, 4, 5]
    assert all(isinstance(item.data, dict) for item in items)
    assert items[0].meta == {"train_iter_data_collected": 7}


def test_deque_buffer_stores_first_priorities(run_steps: Any) -> None:
    buffer = DequeBuffer(100, seed=0)
    buffer.use(PriorityExperienceReplay(buffer))
    run_steps(
        write(trajectories=rows(2, 2)),
        priority_calculator(lambda batch: batch["obs"][..., 0] + 1),
        data_pusher(DequeReplay(buffer)),
    )
    assert [item.meta["priority"] for item in buffer] == [1.0, 2.0, 3.0, 4.0]


def test_deque_buffer_stores_whole_episodes(run_steps: Any) -> None:
    buffer = DequeBuffer(100, seed=0)
    replay = DequeReplay(buffer, whole_episodes=True)
    run_steps(write(episodes=[rows(3), rows(5)]), data_pusher(replay, what="episodes"))
    assert [len(item.data["done"]) for item in buffer] == [3, 5]


def test_episodes_and_rows_are_stored_as_they_come(run_steps: Any) -> None:
    replay = DequeReplay(DequeBuffer(100, seed=0))
    run_steps(write(trajectories=rows(2, 2)), data_pusher(replay))
    run_steps(write(episodes=[rows(3), rows(5)]), data_pusher(replay, what="episodes"))
    assert [item.data["done"].numel() for item in replay.buffer] == [1, 1, 1, 1, 3, 5]
    flat = DequeReplay(DequeBuffer(100, seed=0), whole_episodes=False)
    run_steps(write(episodes=[rows(3)]), data_pusher(flat, what="episodes"))
    assert len(flat) == 3


@pytest.mark.parametrize("burn_in", [0, 2])
def test_sequences_of_one_episode_each_are_sampled(burn_in: int) -> None:
    replay = DequeReplay(DequeBuffer(500, seed=0), unroll_len=3)
    replay.bind(n_step=1, discount=0.9, burn_in=burn_in, start_columns=("state",))
    collector, learned, collected = Collector(3, seed=1), [], set()
    for _ in range(6):
        batch = as_batch([row for step in collector.rows(5) for row in step], (5, 3))
        batch["place"] = batch["obs"]["both"]
        batch["state"] = batch["place"].float()
        collected |= {tuple(place) for place in batch["place"].flatten(0, 1).tolist()}
        replay.push(batch)
    drawn = replay.sample_ahead(len(replay), at_most=1)[0]
    assert drawn["mask"].shape == drawn["reward"].shape == (3 + burn_in, len(replay))
    for number in range(len(replay)):
        n_rows = int(drawn["mask"][:, number].sum())
        places = drawn["place"][:n_rows, number].tolist()
        episode, first = places[0]
        assert places == [[episode, first + step] for step in range(n_rows)]
        assert first % 3 == 0
        assert n_rows > burn_in
        assert drawn["state"][number].tolist() == [episode, first]
        learned += [tuple(place) for place in places[burn_in:]]
    assert len(set(learned)) == len(learned)
    assert set(learned) <= {place for place in collected if place[1] >= burn_in}
    assert len(learned) > len(collected) / 4


def test_r2d2_learns_from_a_deque_buffer(run_steps: Any) -> None:
    with make_env_manager("CartPole-v1", env_num=2, seed=0) as envs:
        policy = R2D2Policy.for_env(envs, burn_in=2, batch_size=4, seed=0)
        replay = DequeReplay(DequeBuffer(200, seed=0), unroll_len=4)
        ctx = run_steps(
            EpsGreedyHandler(0.5),
            StepCollector(policy, envs, n_sample=40),
            data_pusher(replay),
            OffPolicyLearner(policy, replay, update_per_collect=2),
            n_steps=2,
        )
    assert ctx.train_iter == 4
    assert next(iter(replay.buffer)).data["obs"].shape == (6, 4)


def test_a_buffer_of_rows_says_what_holds_sequences() -> None:
    replay = DequeReplay(DequeBuffer(10))
    with pytest.raises(ConfigError, match=r"DequeReplay\(buffer, unroll_len"):
        replay.bind(n_step=1, discount=0.9, burn_in=2, start_columns=())
    with pytest.raises(ConfigError, match="exclude each other"):
        DequeReplay(DequeBuffer(10), whole_episodes=True, unroll_len=3)
    with pytest.raises(ConfigError, match="unroll_len must be"):
        DequeReplay(DequeBuffer(10), unroll_len=0)


def test_sequences_continue_after_a_resume() -> None:
    def made() -> DequeReplay:
        replay = DequeReplay(DequeBuffer(500, seed=0), unroll_len=3)
        replay.bind(n_step=1, discount=0.9, burn_in=1, start_columns=())
        return replay

    collector = Collector(2, seed=1)
    batches = [
        as_batch([row for step in collector.rows(5) for row in step], (5, 2)) for _ in range(4)
    ]
    whole, stopped, resumed = made(), made(), made()
    for batch in batches:
        whole.push(batch)
    for batch in batches[:2]:
        stopped.push(batch)
    resumed.load_state_dict(stopped.state_dict())
    for batch in batches[2:]:
        resumed.push(batch)
    one, two = (replay.sample_ahead(6, at_most=1)[0] for replay in (whole, resumed))
    assert all(torch.equal(one[name], two[name]) for name in ("reward", "mask", "index"))


def test_deque_buffer_is_learned_from_like_any_other(run_steps: Any, dqn: DQNPolicy) -> None:
    learner = OffPolicyLearner(dqn.learn_mode, deque(64), update_per_collect=3)
    ctx = run_steps(learner)
    assert ctx.train_iter == 3
    assert ctx.train_output[0]["total_loss"] > 0


def test_priorities_of_several_outputs_are_written_to_a_deque_buffer(
    run_steps: Any,
) -> None:
    replay = deque(32)
    mode = dataclasses.replace(DQNPolicy(small(32)).learn_mode, forward=priorities_in_two_halves)
    run_steps(OffPolicyLearner(mode, replay), n_steps=1)
    changed = [item for item in replay.buffer if "priority" in item.meta]
    assert len(changed) == 32
    for item in changed:
        assert item.meta["priority"] == pytest.approx(float(item.data["reward"]) + 1)


def test_priorities_are_written_to_a_deque_buffer(run_steps: Any) -> None:
    dqn = DQNPolicy(small(8))
    buffer = DequeBuffer(1000, seed=0)
    buffer.use(PriorityExperienceReplay(buffer))
    batch = transitions(8)
    for number in range(8):
        buffer.push(to_dict(index_rows(batch, number)))
    learner = OffPolicyLearner(dqn.learn_mode, DequeReplay(buffer), update_per_collect=20)
    run_steps(learner)
    assert len({item.meta["priority"] for item in buffer}) > 1


class WithoutPriorities(DQNPolicy):
    """Returns no priorities, like the offline algorithms."""

    def learn(self, batch: Any, **kwargs: Any) -> Any:
        output: Any = dict(super().learn(batch, **kwargs))
        output.pop("priority", None)
        return output


def prioritized(kind: str) -> Any:
    if kind == "TensorBuffer":
        return filled(sampler=PrioritySampler())
    buffer = DequeBuffer(1000, seed=0)
    buffer.use(PriorityExperienceReplay(buffer))
    for row in range(64):
        buffer.push(to_dict(index_rows(transitions(64), row)))
    return DequeReplay(buffer)


def learning_from(buffer: Any, policy: Any, *, by: str) -> list[Any]:
    if by == "OffPolicyLearner":
        return [OffPolicyLearner(policy, buffer)]
    return [offpolicy_data_fetcher(buffer, batch_size=8), trainer(policy)]


KINDS = ["TensorBuffer", "DequeBuffer"]
LEARNERS = ["OffPolicyLearner", "fetcher"]


@pytest.mark.parametrize("by", LEARNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prioritized_buffer_that_nothing_updates_is_refused(
    run_steps: Any, kind: str, by: str
) -> None:
    policy = WithoutPriorities(small(8))
    with pytest.raises(ConfigError, match="returned no priorities"):
        run_steps(*learning_from(prioritized(kind), policy, by=by))


@pytest.mark.parametrize("by", LEARNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_priorities_may_come_from_elsewhere(run_steps: Any, kind: str, by: str) -> None:
    buffer, policy = prioritized(kind), WithoutPriorities(small(8))
    buffer.update_priority([3], [2.0])
    ctx = run_steps(*learning_from(buffer, policy, by=by))
    assert ctx.train_iter == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_buffer_counts_as_updated(run_steps: Any, kind: str) -> None:
    buffer, resumed = prioritized(kind), prioritized(kind)
    run_steps(OffPolicyLearner(DQNPolicy(small(8)), buffer))
    resumed.load_state_dict(buffer.state_dict())
    assert not resumed.lacks_priorities


def test_buffer_that_limits_staleness_gets_the_iteration(run_steps: Any, dqn: DQNPolicy) -> None:
    learner = OffPolicyLearner(dqn.learn_mode, fresh(64), update_per_collect=9)
    # The rows were collected at iteration 3, so updates 0 to 8 may use them.
    assert run_steps(learner).train_iter == 9


def warned(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the numbers of skipped updates that were warned of."""
    return [
        int(re.findall(r"skipped (\d+) update", record.getMessage())[0])
        for record in caplog.records
        if record.name.startswith("middleware.")
    ]


def test_update_without_enough_fresh_rows_is_skipped_and_counted(
    run_steps: Any, dqn: DQNPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    replay = fresh(64)

    @middleware(fills=(replay,))
    def collect_old_rows(ctx: OnlineRLContext) -> None:
        replay.push(transitions(32))

    learner = OffPolicyLearner(dqn, replay)
    ctx = run_steps(collect_old_rows, learner, n_steps=15)
    assert ctx.train_iter == 9
    assert ctx.train_output is None
    assert ctx.logged["learn/skipped_draws"] == 6
    assert warned(caplog) == [1, 2, 4]


def test_update_without_enough_unused_rows_is_skipped_and_counted(
    run_steps: Any, dqn: DQNPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    replay = deque(64)
    replay.buffer.use(use_time_check(replay.buffer, max_use=1))
    learner = OffPolicyLearner(dqn, replay, update_per_collect=9)
    ctx = run_steps(learner)
    assert 1 <= ctx.train_iter < 9
    assert len(ctx.train_output) == ctx.train_iter
    assert warned(caplog) == [1]


@pytest.mark.parametrize("fetches", [False, True])
def test_beta_of_a_buffer_may_follow_the_progress(run_steps: Any, fetches: bool) -> None:
    def draw(*limits: Any) -> float:
        sampler = PrioritySampler(beta=Schedule.linear(0.0, 1.0, by="progress"))
        policy, buffer = DQNPolicy(small(16)), filled(sampler=sampler)
        chain: list[Any] = [OffPolicyLearner(policy, buffer)]
        if fetches:
            chain = [offpolicy_data_fetcher(buffer, batch_size=16), trainer(policy)]
        run_steps(*chain, *limits, ctx=OnlineRLContext(env_step=25))
        return sampler.beta

    assert draw(termination_checker(max_env_step=100)) == 0.25
    with pytest.raises(ChainError, match="beta of the buffer is scheduled by progress"):
        draw()
