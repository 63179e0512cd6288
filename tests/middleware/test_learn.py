import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.data import (
    PrioritySampler,
    TensorBuffer,
    as_tree,
    leaves,
)
from dmiddleware.errors import (
    ChainError,
    ConfigError,
    NonFiniteLoss,
    StructureError,
)
from dmiddleware.pipeline import Task, middleware
from dmiddleware.policy import (
    BCPolicy,
    CQLPolicy,
    DQNPolicy,
    IMPALAPolicy,
    IQLPolicy,
    Policy,
    PolicySettings,
    PPOPolicy,
    TD3BCPolicy,
)
from dmiddleware.rl import Schedule, with_advantages
from dmiddleware.settings import Count
from middleware import OfflineRLContext, OnlineRLContext, Role, gae_estimator, termination_checker
from middleware.learn import OffPolicyLearner, OnPolicyLearner
from tests.middleware.small_dqn import (
    SMALL,
    filled,
    priorities_in_two_halves,
    small,
    transitions,
)


@pytest.mark.parametrize(
    ("column", "place"), [("obs", (5, 2)), ("next_obs", (0, 0)), ("reward", (3,))]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_names_the_column_and_the_row(
    column: str, place: tuple[int, ...], value: float
) -> None:
    policy, batch = DQNPolicy(SMALL), transitions(8)
    batch[column][place] = value
    with pytest.raises(
        NonFiniteLoss, match=rf"'{column}' has {value} at {re.escape(str([*place]))}"
    ):
        policy.learn_mode.forward(batch)


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(small(16))


@pytest.fixture
def ppo() -> PPOPolicy:
    return PPOPolicy(small(8, epoch_per_collect=3))


def weights(policy: Any) -> torch.Tensor:
    state = policy.learn_mode.state_dict()["model"]
    return torch.cat([value.flatten() for value in state.values()])


def test_offpolicy_learner_makes_updates_per_collect_updates(
    run_steps: Any, dqn: DQNPolicy
) -> None:
    before = weights(dqn)
    learner = OffPolicyLearner(dqn.learn_mode, filled(), update_per_collect=5)
    ctx = run_steps(learner, n_steps=2)
    assert ctx.train_iter == 10
    assert len(ctx.train_output) == 5
    assert ctx.train_output[0]["total_loss"] > 0
    assert not torch.equal(before, weights(dqn))


def test_offpolicy_learner_equals_a_hand_written_loop(run_steps: Any, dqn: DQNPolicy) -> None:
    other = DQNPolicy(SMALL)
    run_steps(OffPolicyLearner(dqn.learn_mode, filled(), update_per_collect=7))
    buffer = filled()
    for _ in range(7):
        other.learn_mode.forward(buffer.sample(16))
    assert torch.equal(weights(dqn), weights(other))


def test_nothing_is_learned_until_the_buffer_holds_enough(run_steps: Any) -> None:
    dqn = DQNPolicy(small(8))
    buffer = TensorBuffer(1000, seed=0)
    done = []

    @middleware(fills=(buffer,))
    def collect(ctx: OnlineRLContext) -> None:
        buffer.push(transitions(10))

    def note(ctx: OnlineRLContext) -> None:
        done.append((buffer.count(), ctx.train_iter, ctx.train_output is None))

    learner = OffPolicyLearner(dqn.learn_mode, buffer, learn_start=25)
    run_steps(collect, learner, note, n_steps=4)
    assert done == [(10, 0, True), (20, 0, True), (30, 1, False), (40, 2, False)]


def test_learning_starts_with_one_batch_by_default(run_steps: Any, dqn: DQNPolicy) -> None:
    learner = OffPolicyLearner(dqn.learn_mode, filled(15))
    assert run_steps(learner).train_iter == 0
    learner = OffPolicyLearner(dqn.learn_mode, filled(16))
    assert run_steps(learner).train_iter == 1


def test_priorities_are_written_to_the_buffer(run_steps: Any) -> None:
    dqn = DQNPolicy(small(4))
    sampler = PrioritySampler(alpha=1.0)
    buffer = filled(4, sampler=sampler)
    before = buffer.sample(4)["weight"]
    ctx = run_steps(OffPolicyLearner(dqn.learn_mode, buffer, update_per_collect=20))
    after = buffer.sample(4)["weight"]
    assert before.unique().tolist() == [1.0]
    assert len(after.unique()) > 1
    assert "priority" not in ctx.train_output[0]


def test_priorities_of_several_outputs_go_to_the_rows_of_each(run_steps: Any) -> None:
    dqn = DQNPolicy(small(32))
    buffer = TensorBuffer(100, seed=0, sampler=PrioritySampler(alpha=1.0, beta=1.0))
    buffer.push(transitions(32))
    drawn: set[int] = set()

    def forward(batch: Any) -> list[dict[str, Any]]:
        drawn.update(batch["index"].tolist())
        return priorities_in_two_halves(batch)

    mode = dataclasses.replace(dqn.learn_mode, forward=forward)
    assert run_steps(OffPolicyLearner(mode, buffer), n_steps=1).train_iter == 2
    after = buffer.sample(32)
    # A row's importance weight is in inverse proportion to its priority.
    products = {
        round(float(weight * (reward + 1)), 4)
        for index, weight, reward in zip(
            after["index"].tolist(), after["weight"], after["reward"], strict=True
        )
        if index in drawn
    }
    assert len(products) == 1


@pytest.mark.parametrize("policy_class", [BCPolicy, IQLPolicy, CQLPolicy, TD3BCPolicy])
def test_stock_policies_update_priorities_or_refuse_them(run_steps: Any, policy_class: Any) -> None:
    env = SimpleNamespace(
        observation_space=gym.spaces.Box(-1.0, 1.0, (4,)),
        action_space=gym.spaces.Box(-1.0, 1.0, (2,)),
    )
    options = {"obs_norm": False} if policy_class is TD3BCPolicy else {}
    policy = policy_class.for_env(env, seed=0, batch_size=8, **options)
    buffer = TensorBuffer(1000, seed=0, sampler=PrioritySampler())
    rows = dict(transitions(64).items())
    buffer.push(as_tree({**rows, "action": torch.zeros(64, 2)}))
    returned = "priority" in policy.learn_mode.forward(buffer.sample(8))
    if returned:
        run_steps(OffPolicyLearner(policy, buffer))
        assert not buffer.lacks_priorities
        return
    with pytest.raises(ConfigError, match="returned no priorities"):
        run_steps(OffPolicyLearner(policy, buffer))


def test_nan_stops_the_run_and_leaves_the_parameters(run_steps: Any, dqn: DQNPolicy) -> None:
    buffer = TensorBuffer(100)
    bad = transitions(16)
    bad["reward"][:] = float("nan")
    buffer.push(bad)
    before = weights(dqn)
    with pytest.raises(NonFiniteLoss, match="train_iter 3"):
        run_steps(OffPolicyLearner(dqn.learn_mode, buffer))
    assert torch.equal(before, weights(dqn))


def learning_rates(run_steps: Any, schedule: Schedule, *others: Any, **start: int) -> list[float]:
    seen: list[float] = []

    def collect(ctx: OnlineRLContext) -> None:
        ctx.env_step += 10

    def note(ctx: OnlineRLContext) -> None:
        seen.extend(output["cur_lr"] for output in ctx.train_output)

    policy = DQNPolicy(small(16, learning_rate=schedule))
    learner = OffPolicyLearner(policy, filled(), update_per_collect=2)
    run_steps(collect, learner, note, *others, n_steps=2, ctx=OnlineRLContext(**start))
    return seen


def test_learning_rate_follows_the_counter_of_its_schedule(run_steps: Any) -> None:
    by_step = Schedule.linear(1.0e-2, 0.0, decay=100)
    expected = pytest.approx([9.0e-3, 9.0e-3, 8.0e-3, 8.0e-3])
    assert learning_rates(run_steps, by_step) == expected
    by_progress = Schedule.linear(1.0e-2, 0.0, by="progress")
    limit = termination_checker(max_env_step=100)
    assert learning_rates(run_steps, by_progress, limit) == expected
    by_update = Schedule.linear(1.0e-2, 0.0, decay=4, by="update")
    assert learning_rates(run_steps, by_update) == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_schedules_by_counters_that_nobody_counts_are_refused(run_steps: Any) -> None:
    policy = DQNPolicy(small(16, learning_rate={"start": 1.0, "end": 0.0}))
    with pytest.raises(ChainError, match="env_step, which OfflineRLContext does not count"):
        run_steps(OffPolicyLearner(policy, filled()), ctx=OfflineRLContext())
    with pytest.raises(ChainError, match=r"learning_rate is scheduled by progress"):
        learning_rates(run_steps, Schedule.linear(1.0, 0.0, by="progress"))


def test_argument_that_is_not_a_buffer_is_rejected(dqn: DQNPolicy) -> None:
    with pytest.raises(ConfigError, match="must be a TensorBuffer"):
        OffPolicyLearner(dqn.learn_mode, [])  # type: ignore[arg-type]


def test_argument_that_is_not_a_learner_is_rejected(dqn: DQNPolicy) -> None:
    with pytest.raises(ConfigError, match="OffPolicyLearner takes a policy"):
        OffPolicyLearner(dqn.eval_mode, filled())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8, "update_per_collect": 0}, "update_per_collect must be an integer ≥ 1"),
        ({"batch_size": 8, "learn_start": 7}, r"learn_start must be at least batch_size \(8\)"),
        ({"batch_size": 8, "learn_start": 1001}, r"learn_start must be at most .* \(1000\)"),
        ({"batch_size": 1001}, r"batch_size must be at most the buffer's size \(1000\)"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, int], message: str) -> None:
    dqn = DQNPolicy(small(options.pop("batch_size")))
    with pytest.raises(ConfigError, match=message):
        OffPolicyLearner(dqn.learn_mode, filled(), **options)


class NoBatchSize(PolicySettings):
    """Leaves the batch size open."""

    batch_size: Count | None = None


class WithoutBatchSize(Policy):
    """Has no batch size."""

    cfg: NoBatchSize

    def learn(self, batch: Any) -> dict[str, Any]:
        return {"total_loss": 0.0}


def test_a_policy_without_a_batch_size_is_refused() -> None:
    model = torch.nn.Linear(4, 2)
    policy = WithoutBatchSize({}, model=model, modes=["learn"])
    message = r"OffPolicyLearner reads batch_size from the policy, which has none"
    with pytest.raises(ConfigError, match=message):
        OffPolicyLearner(policy, filled())


def on_policy_data(n_steps: int, n_envs: int) -> Any:
    n = n_steps * n_envs
    draw = torch.Generator().manual_seed(0)
    columns = {
        "collect_iter": torch.arange(n),
        "reward": torch.ones(n),
        "obs": torch.randn(n, 4, generator=draw),
        "action": torch.randint(2, (n,), generator=draw),
        "log_prob": torch.full((n,), -0.7),
        "value": torch.zeros(n),
        "adv": torch.randn(n, generator=draw),
        "ret": torch.randn(n, generator=draw),
        "done": torch.zeros(n, dtype=torch.bool),
    }
    return as_tree(
        {key: value.reshape(n_steps, n_envs, *value.shape[1:]) for key, value in columns.items()}
    )


def give(data: Any) -> Any:
    def give(ctx: OnlineRLContext) -> None:
        ctx.train_data = data

    give.writes = ("train_data",)  # type: ignore[attr-defined]
    return give


def recording(policy: PPOPolicy, seen: list[list[int]], **answer: Any) -> Any:
    mode = policy.learn_mode

    def forward(batch: Any) -> dict[str, Any]:
        seen.append(batch["collect_iter"].tolist())
        return {**mode.forward(batch), **answer}

    return dataclasses.replace(mode, forward=forward)


def test_onpolicy_learner_uses_every_row_once_per_epoch(run_steps: Any, ppo: PPOPolicy) -> None:
    seen: list[list[int]] = []
    learner = OnPolicyLearner(recording(ppo, seen))
    ctx = run_steps(give(on_policy_data(5, 6)), learner)
    assert ctx.train_iter == len(ctx.train_output) == 9
    epochs = [[row for part in seen[i : i + 3] for row in part] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_minibatches_are_of_one_size_and_never_tiny(run_steps: Any) -> None:
    ppo = PPOPolicy(small(8, epoch_per_collect=1))
    seen: list[list[int]] = []
    learner = OnPolicyLearner(recording(ppo, seen))
    run_steps(give(on_policy_data(11, 3)), learner)
    assert sorted(len(rows) for rows in seen) == [8, 8, 8, 9]


def test_the_age_of_the_weights_that_collected_is_logged(run_steps: Any, ppo: PPOPolicy) -> None:
    data = on_policy_data(2, 3)
    data["collect_iter"] = torch.tensor([[4, 4, 4], [5, 5, 5]])
    logged: dict[str, float] = {}
    run_steps(
        give(data),
        OnPolicyLearner(ppo),
        lambda ctx: logged.update(ctx.logged),
        ctx=OnlineRLContext(train_iter=7),
    )
    assert logged["learn/policy_lag"] == 2.5


def test_policy_that_computes_its_targets_learns_from_trajectories(run_steps: Any) -> None:
    policy = IMPALAPolicy(small(10))
    rows = on_policy_data(5, 6)
    rows["next_obs"], rows["terminated"] = rows["obs"], rows["done"]

    @middleware(writes=("trajectories",))
    def collect(ctx: OnlineRLContext) -> None:
        ctx.trajectories = rows

    learner = OnPolicyLearner(policy)
    assert learner.reads == ("trajectories", "train_iter")
    ctx = run_steps(collect, learner)
    assert ctx.train_iter == len(ctx.train_output) == 3
    with pytest.raises(ChainError, match=r"reads ctx\.trajectories"):
        run_steps(give(rows), OnPolicyLearner(policy))


def batches_of(policy: Any, run_steps: Any, data: Any) -> list[Any]:
    seen: list[Any] = []
    mode = policy.learn_mode

    def forward(batch: Any) -> dict[str, Any]:
        seen.append(batch)
        return {"total_loss": 0.0}

    run_steps(give(data), OnPolicyLearner(dataclasses.replace(mode, forward=forward)))
    return seen


def test_only_columns_that_the_policy_learns_from_are_gathered(run_steps: Any) -> None:
    ppo = PPOPolicy(small(8, epoch_per_collect=1))
    data = on_policy_data(5, 6)
    for batch in batches_of(ppo, run_steps, data):
        assert set(batch.keys()) == {*PPOPolicy.learn_columns, "collect_iter"}


def test_minibatches_are_gathered_on_the_device_of_the_policy(run_steps: Any) -> None:
    ppo = PPOPolicy(small(10, epoch_per_collect=2))
    # Nothing can be computed on the device meta from tensors of another one.
    mode = dataclasses.replace(ppo.learn_mode, spec=dataclasses.replace(ppo.spec, device="meta"))
    data = on_policy_data(5, 6)
    batches = batches_of(SimpleNamespace(learn_mode=mode), run_steps, data)
    assert {leaf.device.type for batch in batches for _, leaf in leaves(batch)} == {"meta"}
    assert [tuple(batch["obs"].shape) for batch in batches] == [(10, 4)] * 6


class Seeing(PPOPolicy):
    act_inputs = ("is_first", "info.lives")


def test_what_the_policy_saw_when_it_acted_is_gathered_too(run_steps: Any) -> None:
    columns = dict(on_policy_data(5, 6).items())
    columns["is_first"] = columns["done"]
    columns["info"] = {"lives": columns["ret"]}
    data = as_tree(columns)
    (batch,) = batches_of(Seeing(small(30, epoch_per_collect=1)), run_steps, data)
    assert set(batch.keys()) == {*PPOPolicy.learn_columns, "collect_iter", "is_first", "info"}


class AnyColumn(PPOPolicy):
    optional_columns = None


def test_policy_that_does_not_say_what_it_reads_gets_every_column(run_steps: Any) -> None:
    data = on_policy_data(5, 6)
    (batch,) = batches_of(AnyColumn(small(30, epoch_per_collect=1)), run_steps, data)
    assert set(batch.keys()) == set(data.keys())


class ByLanes(PPOPolicy):
    minibatch_unit = "lanes"


def test_lanes_stay_whole_and_in_order_of_time(run_steps: Any) -> None:
    data = on_policy_data(5, 7)
    batches = batches_of(ByLanes(small(8, epoch_per_collect=2)), run_steps, data)
    # A lane has 5 rows, so at least two lanes make 8 rows.
    assert [tuple(batch["obs"].shape) for batch in batches] == [(5, 3, 4), (5, 2, 4), (5, 2, 4)] * 2
    seen = [batch["collect_iter"] for batch in batches]
    for epoch in (seen[:3], seen[3:]):
        lanes = torch.cat(epoch, 1)
        assert sorted(lanes[0].tolist()) == list(range(7))
        assert torch.equal(lanes, lanes[0] + 7 * torch.arange(5).unsqueeze(1))


def test_lanes_of_rows_that_are_not_a_grid_are_refused(run_steps: Any) -> None:
    rows = as_tree({name: one[0] for name, one in on_policy_data(1, 6).items() if name != "obs"})
    with pytest.raises(StructureError, match=r"need batches \[T, E, …\]"):
        batches_of(ByLanes(small(2, epoch_per_collect=1)), run_steps, rows)


def test_advantages_are_recomputed_before_every_further_epoch(run_steps: Any) -> None:
    learn = {"recompute_advantage": True, "learning_rate": 0.01, "adv_norm": False}
    policy = PPOPolicy({**small(12, epoch_per_collect=3, **learn), "reward_norm": True})
    collected = {"next_obs": torch.randn(6, 2, 4), "terminated": torch.rand(6, 2) < 0.2}
    rows = {**dict(on_policy_data(6, 2).items()), **collected}
    rows["episode_id"] = torch.arange(2).expand(6, 2)
    rows["done"] = rows["terminated"].clone()
    rows["reward"] = torch.arange(12.0).reshape(6, 2)
    seen: list[Any] = []
    mode = policy.learn_mode

    def forward(batch: Any) -> dict[str, Any]:
        value_fn = policy.value_fn
        normalizer = policy.reward_normalizer
        expected = with_advantages(
            as_tree({**rows, "value": value_fn(rows["obs"])}),
            reward=normalizer.normalize(rows["reward"]),
            value_fn=value_fn,
            discount=0.99,
            gae_lambda=0.95,
        )
        order = batch["collect_iter"].argsort()
        got = {name: batch[name][order].reshape(6, 2) for name in ("value", "adv", "ret")}
        seen.append((got, expected))
        return mode.forward(batch)

    def provide(ctx: OnlineRLContext) -> None:
        ctx.trajectories = as_tree(rows)

    provide.writes = ("trajectories",)  # type: ignore[attr-defined]
    learner = OnPolicyLearner(dataclasses.replace(mode, forward=forward))
    run_steps(provide, gae_estimator(policy), learner)
    (first, _), *later = seen
    assert torch.equal(first["value"], rows["value"])
    for got, expected in later:
        for name, column in got.items():
            torch.testing.assert_close(column, expected[name])
    assert not torch.equal(later[0][0]["adv"], later[1][0]["adv"])


def test_recomputing_advantages_of_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from lanes"):
        OnPolicyLearner(ByLanes({**SMALL, "recompute_advantage": True}))


def test_fewer_rows_than_a_minibatch_make_one(run_steps: Any) -> None:
    ppo = PPOPolicy(small(64, epoch_per_collect=1))
    seen: list[list[int]] = []
    learner = OnPolicyLearner(recording(ppo, seen))
    run_steps(give(on_policy_data(2, 3)), learner)
    assert [len(rows) for rows in seen] == [6]


def test_order_of_minibatches_follows_the_seed_of_the_task(run_steps: Any) -> None:
    ppo = PPOPolicy(small(8, epoch_per_collect=1))

    def order(seed: int) -> list[list[int]]:
        seen: list[list[int]] = []
        learner = OnPolicyLearner(recording(ppo, seen))
        run_steps(give(on_policy_data(5, 6)), learner, seed=seed)
        return seen

    assert order(1) == order(1) != order(2)


def test_policy_that_moved_too_far_ends_the_epochs(run_steps: Any, ppo: PPOPolicy) -> None:
    seen: list[list[int]] = []
    learner = OnPolicyLearner(recording(ppo, seen, kl_stop=True))
    ctx = run_steps(give(on_policy_data(5, 6)), learner)
    assert len(seen) == len(ctx.train_output) == 1
    assert ctx.train_iter == 0


def test_real_kl_stop_of_ppo_ends_the_epochs(run_steps: Any) -> None:
    policy = PPOPolicy({**small(8, epoch_per_collect=100, learning_rate=0.05), "target_kl": 0.01})
    learner = OnPolicyLearner(policy.learn_mode)
    ctx = run_steps(give(on_policy_data(5, 6)), learner)
    assert ctx.train_output[-1]["kl_stop"]
    assert ctx.train_iter == len(ctx.train_output) - 1 < 299


def test_order_continues_from_a_saved_state() -> None:
    ppo = PPOPolicy(small(30, epoch_per_collect=1))

    def order(n_steps: int, state: Any = None) -> tuple[list[list[int]], Any]:
        seen: list[list[int]] = []
        with Task(OnlineRLContext()) as task:
            task.use(give(on_policy_data(5, 6)))
            task.use(OnPolicyLearner(recording(ppo, seen)))
            if state is not None:
                task.load_state_dict(state)
            task.run(max_step=n_steps)
            return seen, task.state_dict()

    whole, _ = order(4)
    begin, state = order(2)
    rest, _ = order(2, state)
    assert begin + rest == whole


def test_learners_are_active_in_the_role_learner(dqn: DQNPolicy, ppo: PPOPolicy) -> None:
    for one in (OffPolicyLearner(dqn, filled()), OnPolicyLearner(ppo)):
        assert one.roles == (Role.LEARNER,)
