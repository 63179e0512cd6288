"""PPO with a memory."""

import functools

import numpy as np
import pytest
import torch

from dmiddleware.data import as_tree, cat, index_rows, minibatches
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyError, StructureError
from dmiddleware.model import ActorCritic
from dmiddleware.policy import RecurrentPPOPolicy
from dmiddleware.rl import gae, with_advantages
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.zoo.envs import Recall
from tests.dmiddleware.recurrent_policy import masked_cartpole

SMALL = {"hidden_size": 16, "encoder_hidden_sizes": [8], "head_hidden_sizes": [8]}


def made(envs, **options):
    options = {"seed": 0, "model": SMALL, **options}
    return RecurrentPPOPolicy.for_env(envs, **options)


def collected(n_sample=120, **options):
    """Return a policy and what it collected in several calls, one lane for each env."""
    with masked_cartpole(3, seed=0) as envs:
        policy = made(envs, **options)
        collector = RolloutCollector(policy, envs)
        return policy, cat([collector.collect(n_sample), collector.collect(n_sample)])


def lane(rows, env):
    """Return the rows of one env."""
    return index_rows(rows, (slice(None), env))


def run(policy, rows, state):
    """Run the model over lanes from a state, by what the columns say."""
    model = policy.model
    seen = {name: rows[name] for name in model.act_inputs}
    with torch.no_grad():
        return model(rows["obs"], state, **seen)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_running_a_lane_again_gives_what_acting_gave(core):
    policy, rows = collected(model={**SMALL, "core": core})
    assert rows["done"].any()
    assert (rows["state"][rows["is_first"]] == 0).all()
    for first in (0, 17):
        part = index_rows(rows, slice(first, None))
        again = run(policy, part, part["state"][0])
        for name in ("logit", "value"):
            torch.testing.assert_close(again[name], part[name], rtol=1e-4, atol=1e-5)


def test_only_what_the_model_sees_is_collected():
    for options in ({}, {"prev_action": False}, {"prev_reward": False}):
        _, rows = collected(30, model={**SMALL, **options})
        for name in ("prev_action", "prev_reward"):
            assert (name in rows) == options.get(name, True)
        assert {"is_first", "state"} <= set(rows)


def test_the_first_update_starts_from_the_policy_that_collected():
    policy, rows = collected(learning_rate=1e-3)
    rows = with_advantages(
        rows,
        reward=rows["reward"],
        value_fn=policy.value_fn,
        discount=0.99,
        gae_lambda=0.95,
    )
    (batch,) = minibatches(rows, 1, unit="lanes")
    outputs = [policy.learn_mode.forward(batch) for _ in range(2)]
    assert outputs[0]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert outputs[0]["clip_fraction"] == 0.0
    assert outputs[1]["approx_kl"] > 1e-6


def test_the_update_is_that_of_whole_lanes_from_the_stored_state():
    """The loss of lanes is that of PPO on the rows, if the model's outputs are those of lanes."""
    policy, rows = collected()
    rows = index_rows(rows, slice(17, None))  # in the middle of episodes
    adv, ret = torch.randn(2, *rows["value"].shape)
    rows = as_tree({**dict(rows.items()), "adv": adv, "ret": ret})
    again = run(policy, rows, rows["state"][0])
    log_probs = torch.log_softmax(again["logit"], -1)
    log_prob = log_probs.gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - rows["log_prob"]).exp()
    adv = (rows["adv"] - rows["adv"].mean()) / (rows["adv"].std() + 1e-8)
    policy_loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    value_loss = 0.5 * (again["value"] - rows["ret"]).square().mean()
    output = policy.learn_mode.forward(rows)
    assert output["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-6)
    assert output["value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)


def test_the_value_of_a_successor_continues_from_the_state_of_its_row():
    policy, rows = collected()
    value = policy.value_fn(rows["next_obs"][:, 0], rows=lane(rows, 0))
    follows = ~rows["done"][:-1, 0]
    torch.testing.assert_close(value[:-1][follows], rows["value"][1:, 0][follows])
    # Where an episode ends, the value is not that of the next row, which starts another one.
    assert not torch.isclose(value[:-1][~follows], rows["value"][1:, 0][~follows]).any()


def test_advantages_bootstrap_from_these_values():
    policy, rows = collected()
    value_fn = policy.value_fn
    next_value = torch.stack(
        [value_fn(rows["next_obs"][:, env], rows=lane(rows, env)) for env in range(3)], 1
    )
    wanted = gae(
        rows["reward"],
        rows["value"],
        next_value,
        rows["terminated"],
        rows["done"],
        discount=0.99,
        gae_lambda=0.95,
    )
    found = with_advantages(
        rows, reward=rows["reward"], value_fn=value_fn, discount=0.99, gae_lambda=0.95
    )
    torch.testing.assert_close(found["adv"], wanted.adv, rtol=1e-4, atol=1e-4)


def test_an_observation_alone_has_no_value():
    policy, rows = collected(30)
    with pytest.raises(StructureError, match="use GAEEstimator"):
        policy.value_fn(rows["next_obs"][0])


def test_rows_without_time_are_rejected():
    policy, rows = collected(30)
    rows = as_tree({**dict(rows.items()), "adv": rows["value"], "ret": rows["value"]})
    with pytest.raises(StructureError, match="lanes"):
        policy.learn_mode.forward(index_rows(rows, 0))
    del rows["state"]
    with pytest.raises(StructureError, match="lacks state"):
        policy.learn_mode.forward(rows)


def test_a_model_without_a_memory_is_rejected():
    with masked_cartpole(1) as envs, pytest.raises(PolicyError, match="ActorCritic is not a Rec"):
        made(envs, model=ActorCritic(2, 2))


def test_evaluating_is_greedy_or_draws_and_returns_the_state():
    policy, rows = collected(30)
    row = index_rows(rows, 5)
    inputs = {name: row[name] for name in ("is_first", "prev_action", "prev_reward", "state")}
    greedy = policy.eval_mode.forward(row["obs"], **inputs)
    assert torch.equal(greedy["action"], row["logit"].argmax(-1))
    torch.testing.assert_close(greedy["state"], rows["state"][6])
    draw = functools.partial(policy.eval_mode.forward, deterministic=False)
    assert len({tuple(draw(row["obs"], **inputs)["action"].tolist()) for _ in range(30)}) > 1


def test_continuous_actions_are_seen_raw():
    with make_env_manager("Pendulum-v1", env_num=2, seed=0) as envs:
        policy = made(envs)
        rows = RolloutCollector(policy, envs).collect(40)
    seen = []
    core = policy.model.core
    core.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    names = ("is_first", "prev_action", "prev_reward", "state")
    policy.collect_mode.forward(rows["obs"][7], **{name: rows[name][7] for name in names})
    torch.testing.assert_close(seen[0][0, :, 8], rows["prev_action"][7, :, 0] / 2.0)


@pytest.mark.learning
def test_it_recalls_a_cue_that_no_policy_without_a_memory_can_recall():
    """Without a memory, the best possible return is 1 / 4; see test_memory_envs."""
    make = functools.partial(Recall, n_cues=4, delay=2)
    order = torch.Generator().manual_seed(0)
    with make_env_manager(make, env_num=16, seed=0) as envs:
        policy = made(
            envs,
            model={"core": "gru", "hidden_size": 32},
            discount=0.9,
            learning_rate=5e-3,
            entropy_weight=0.01,
        )
        collector = RolloutCollector(policy, envs)
        for _ in range(15):
            rows = collector.collect(16 * 32)
            rows = with_advantages(
                rows,
                reward=rows["reward"],
                value_fn=policy.value_fn,
                discount=0.9,
                gae_lambda=0.95,
            )
            for _ in range(4):
                for batch in minibatches(rows, 4, unit="lanes", generator=order):
                    policy.learn_mode.forward(batch)
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert np.mean(returns) > 0.7
