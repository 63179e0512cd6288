"""Decision Transformer."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyError, SpaceError
from dmiddleware.model import DecisionTransformer
from dmiddleware.policy import DecisionTransformerPolicy
from dmiddleware.rl import with_returns_to_go
from dmiddleware.rollout import evaluate_episodes

from .mixed_data import LENGTH, Follow, bc_regret, mixed_rows, regret

SMALL = {"context_length": LENGTH, "embed_size": 16, "n_layers": 1, "dropout": 0.0}


def made(env: Any = None, model: Any = None, **options: Any) -> DecisionTransformerPolicy:
    options = {"seed": 0, "return_scale": 1.0, "obs_norm": False, **options}
    return DecisionTransformerPolicy.for_env(
        env or Follow(), model={**SMALL, **(model or {})}, **options
    )


def buffer_for(policy: DecisionTransformerPolicy) -> TensorBuffer:
    buffer = TensorBuffer(2000, unroll_len=policy.context_length, seed=0)
    buffer.push(with_returns_to_go(mixed_rows()))
    return buffer


def random_steps(n: int, n_steps: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    obs = torch.rand(n_steps, n, 2, generator=generator)
    reward = torch.rand(n_steps, n, generator=generator)
    return obs, reward


def test_a_prediction_sees_the_steps_before_it_and_no_later_ones() -> None:
    model = made().model.eval()
    obs, ret = random_steps(3, LENGTH)
    action = torch.rand(LENGTH, 3, 1)
    place = torch.arange(LENGTH)[:, None].expand(-1, 3)
    before = model(obs, action, ret, place)["mu"]
    columns = {"obs": obs, "action": action, "return_to_go": ret}
    for name, column in columns.items():
        changed = column.clone()
        changed[2] += 0.5
        after = model(**{**columns, name: changed}, timestep=place)["mu"]
        differs = (after != before).any(-1).any(-1).tolist()
        # The action of a step is what it predicts, so it may only see it in the steps after.
        assert differs == [False, False, name != "action", True], name


@pytest.mark.parametrize("context_length", [1, 3, 8])
def test_acting_step_by_step_predicts_like_one_pass_over_the_window(context_length: int) -> None:
    policy = made(model={"context_length": context_length}, target_return=2.0)
    model = policy.model.eval()
    n_steps = 6
    obs, reward = random_steps(3, n_steps)
    state: Any = policy.initial_state(3)
    prev_reward, left = torch.zeros(3), [torch.full((3,), 2.0)]
    actions: list[torch.Tensor] = []
    for t in range(n_steps):
        output = policy.eval_mode.forward(obs[t], state=state, prev_reward=prev_reward)
        state = output["state"]
        first = max(0, t + 1 - context_length)
        raw = torch.stack([*actions[first:], torch.zeros(3, 1)])
        place = torch.arange(first, t + 1)[:, None].expand(-1, 3)
        with torch.no_grad():
            seen = model(obs[first : t + 1], raw, torch.stack(left[first:]), place)["mu"][-1]
        torch.testing.assert_close(output["action"], 2 * seen, rtol=1e-4, atol=1e-5)
        actions.append(output["action"] / 2)
        prev_reward = reward[t]
        left.append(left[-1] - prev_reward)


def test_envs_in_different_steps_do_not_disturb_each_other() -> None:
    policy = made(model={"context_length": 3}, target_return=1.0)
    obs, reward = random_steps(1, 5)
    alone: list[torch.Tensor] = []
    state: Any = policy.initial_state(1)
    for t in range(5):
        output = policy.eval_mode.forward(
            obs[t], state=state, prev_reward=reward[t - 1] if t else torch.zeros(1)
        )
        state = output["state"]
        alone.append(output["action"])
    # The second env starts two steps later.
    both: Any = policy.initial_state(2)
    for t in range(5):
        late = max(t - 2, 0)
        if t == 2:
            for name, column in policy.initial_state(1).items():
                both[name][1:] = column
        rewards = torch.cat([reward[t - 1] if t else torch.zeros(1), reward[late - 1] * (late > 0)])
        output = policy.eval_mode.forward(
            torch.cat([obs[t], obs[late]]), state=both, prev_reward=rewards
        )
        both = output["state"]
        torch.testing.assert_close(output["action"][:1], alone[t])
        if t >= 2:
            torch.testing.assert_close(output["action"][1:], alone[late])


def test_acting_without_the_state_is_rejected() -> None:
    with pytest.raises(PolicyError, match=r"policy\.initial_state"):
        made().eval_mode.forward(torch.zeros(2, 2))


def test_padding_does_not_count() -> None:
    batch = buffer_for(made()).sample(32)
    assert not batch["mask"].all()
    outputs = []
    for filler in (0.0, 0.9):
        batch["action"][~batch["mask"]] = filler
        outputs.append(made().learn_mode.forward(batch)["total_loss"])
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-5)


def test_the_loss_is_the_error_of_the_actions_of_the_data() -> None:
    policy = made()
    batch = buffer_for(policy).sample(32)
    mask, raw = batch["mask"], batch["action"] / 2
    with torch.no_grad():
        mu = policy.model(batch["obs"], raw, batch["return_to_go"], batch["timestep"])["mu"]
    wanted = (mu - raw)[mask].square().mean().item()
    assert policy.learn_mode.forward(batch)["total_loss"] == pytest.approx(wanted, rel=1e-4)


def test_the_largest_return_of_an_episode_is_asked_for() -> None:
    policy = made()
    batch = buffer_for(policy).sample(64)
    begins = batch["mask"] & (batch["timestep"] == 0)
    wanted = batch["return_to_go"][begins].max().item()
    assert policy.learn_mode.forward(batch)["largest_return"] == pytest.approx(wanted)
    state: Any = policy.initial_state(2)
    other = made()
    other.collect_mode.load_state_dict(policy.collect_mode.state_dict())
    output = other.eval_mode.forward(torch.zeros(2, 2), state=state, prev_reward=torch.zeros(2))
    assert output["state"]["return_to_go"][:, 0].tolist() == pytest.approx([wanted] * 2)


def test_dropout_leaves_an_interrupted_run_exact() -> None:
    def policy() -> DecisionTransformerPolicy:
        return made(model={"dropout": 0.3})

    whole, first, second = policy(), policy(), policy()
    batch = buffer_for(whole).sample(16)
    torch.manual_seed(1)
    outputs = [whole.learn_mode.forward(batch) for _ in range(4)]
    assert outputs[0]["total_loss"] != outputs[1]["total_loss"]
    for _ in range(2):
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    torch.manual_seed(2)
    assert [second.learn_mode.forward(batch) for _ in range(2)] == outputs[2:]


def test_discrete_actions_are_learned_and_masked() -> None:
    policy = made(gym.make("CartPole-v1"), model={"context_length": 5})
    buffer = TensorBuffer(100, unroll_len=5, seed=0)
    rows = mixed_rows(25)
    rows["obs"], rows["next_obs"] = (torch.cat([rows[n], rows[n]], -1) for n in ("obs", "next_obs"))
    rows["action"] = (rows["action"][:, 0] > 0).long()
    buffer.push(with_returns_to_go(rows))
    output = policy.learn_mode.forward(buffer.sample(16))
    assert 0.0 <= output["accuracy"] <= 1.0
    assert output["total_loss"] == pytest.approx(math.log(2), abs=0.5)
    with make_env_manager("CartPole-v1", env_num=2, seed=0) as envs:
        assert len(evaluate_episodes(policy, envs, 2).get_episode_return()) == 2
    mask = torch.tensor([[False, True], [True, False]])
    acted = policy.eval_mode.forward(
        torch.zeros(2, 4),
        state=policy.initial_state(2),
        prev_reward=torch.zeros(2),
        action_mask=mask,
    )
    assert acted["action"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_size": 10, "n_heads": 3}, "multiple of n_heads"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"context_length": 0}, "context_length"),
    ],
)
def test_an_impossible_network_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecisionTransformer(2, 1, action_space="continuous", **options)


def test_actions_of_several_parts_are_refused() -> None:
    with pytest.raises(SpaceError, match="needs Discrete actions or a Box"):
        DecisionTransformer(2, (2, 3), action_space="multi_discrete")


@pytest.mark.learning
def test_it_beats_cloning_on_mixed_data() -> None:
    policy = made(learning_rate=3e-3, obs_norm=True)
    policy.observe(mixed_rows()["obs"])
    buffer = buffer_for(policy)
    for _ in range(200):
        policy.learn_mode.forward(buffer.sample(32))
    assert bc_regret() > 0.8
    assert regret(policy) < bc_regret() / 3
    # It does what it is asked for: a low return as well.
    asked = made(obs_norm=True, target_return=0.0)
    asked.eval_mode.load_state_dict(policy.eval_mode.state_dict())
    assert regret(asked) > 2 * bc_regret()
