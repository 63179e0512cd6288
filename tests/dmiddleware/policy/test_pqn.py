"""PQN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware import Task
from dmiddleware.env import VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import PQNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.schedule import Schedule
from dmiddleware.tree import Batch, as_tree
from dmiddleware.zoo.tensor_envs import CartPole
from middleware import EpsGreedyHandler, OnlineRLContext, OnPolicyLearner, StepCollector
from tests.variants import mostly_slow

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16]}


def made(**cfg: Any) -> PQNPolicy:
    return PQNPolicy({"model": MODEL, "seed": 0, **cfg})


def lanes(n_steps: int = 6, n_lanes: int = 3) -> Batch:
    """Return ``[T, E, …]``: in lane 0 an episode terminates, and in lane 1 one is cut."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(n_steps + 1, n_lanes, 4, generator=generator)
    terminated, truncated = torch.zeros(2, n_steps, n_lanes, dtype=torch.bool)
    terminated[2, 0] = truncated[3, 1] = True
    next_obs = obs[1:].clone()
    next_obs[3, 1] = torch.randn(4, generator=generator)
    return as_tree(
        {
            "obs": obs[:-1],
            "next_obs": next_obs,
            "action": torch.randint(3, (n_steps, n_lanes), generator=generator),
            "reward": torch.randn(n_steps, n_lanes, generator=generator),
            "terminated": terminated,
            "done": terminated | truncated,
        }
    )


def returns_of_algorithm_1(policy: PQNPolicy, rows: Batch, discount: float, decay: float) -> Any:
    """Return ``[T, E]`` by a loop over rows, from the last one on."""
    with torch.no_grad():
        best = policy.model.eval()(rows["next_obs"])["logit"].amax(-1)
    ret = torch.zeros_like(rows["reward"])
    n_steps, n_lanes = ret.shape
    for lane in range(n_lanes):
        for t in reversed(range(n_steps)):
            follows = best[t, lane]
            if not (rows["done"][t, lane] or t == n_steps - 1):
                follows = decay * ret[t + 1, lane] + (1 - decay) * follows
            if rows["terminated"][t, lane]:
                follows = torch.zeros(())
            ret[t, lane] = rows["reward"][t, lane] + discount * follows
    return ret


@pytest.mark.parametrize("decay", [0.0, 0.65, 1.0])
def test_targets_are_the_lambda_returns_of_the_paper(decay: float) -> None:
    policy, rows = made(trace_decay=decay, discount=0.9), lanes()
    ret = policy.add_returns(rows)["ret"]
    torch.testing.assert_close(ret, returns_of_algorithm_1(policy, rows, 0.9, decay))


def test_the_loss_is_the_squared_error_of_the_actions_that_were_taken() -> None:
    policy = made()
    rows = policy.add_returns(lanes())
    batch = as_tree({name: rows[name].flatten(0, 1) for name in ("obs", "action", "ret")})
    q = policy.model(batch["obs"])["logit"]
    errors = batch["ret"] - q.gather(1, batch["action"].unsqueeze(-1)).squeeze(-1)
    parameters = list(policy.model.parameters())
    wanted = torch.autograd.grad(errors.square().mean(), parameters)
    norm = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    output = policy.learn_mode.forward(batch)
    assert output["total_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-5)
    assert output["td_error"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)
    assert output["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    scale = min(1.0, 10.0 / norm.item())
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, scale * gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("in_obs", [False, True])
def test_no_target_bootstraps_from_a_masked_action(in_obs: bool) -> None:
    shape: Any = {"observation": 4, "action_mask": 3} if in_obs else 4
    policy = made(model={**MODEL, "obs_shape": shape}, discount=0.5)
    rows = lanes()
    mask = torch.tensor([True, False, True]).expand(6, 3, 3)
    if in_obs:
        for name in ("obs", "next_obs"):
            rows[name] = as_tree({"observation": rows[name], "action_mask": mask.float()})
    else:
        rows["next_action_mask"] = mask
    with torch.no_grad():
        q = policy.model.eval()(rows["next_obs"])["logit"]
    policy.model.register_forward_hook(tempt)
    ret = policy.add_returns(rows)["ret"]
    last = rows["reward"][-1] + 0.5 * q[-1, :, [0, 2]].amax(-1)
    torch.testing.assert_close(ret[-1], last)
    seen = rows["obs"][0]
    given = {} if in_obs else {"action_mask": mask[0]}
    for eps in (0.0, 1.0):
        action = policy.collect_mode.forward(seen, eps=eps, **given)["action"]
        assert not (action == 1).any()
    assert not (policy.eval_mode.forward(seen, **given)["action"] == 1).any()


def tempt(module: nn.Module, inputs: Any, output: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Make the second action the best by far."""
    return {"logit": output["logit"] + torch.tensor([0.0, 1000.0, 0.0])}


def test_the_network_has_layer_normalization_and_no_target() -> None:
    policy = PQNPolicy({"model": {"obs_shape": 4, "action_shape": 3}})
    assert any(isinstance(layer, nn.LayerNorm) for layer in policy.model.modules())
    assert not policy.q.has_target
    with pytest.raises(ConfigError, match="noisy"):
        made(model={**MODEL, "noisy": True})


def test_targets_are_those_of_rewards_that_another_middleware_has_changed() -> None:
    """An intrinsic reward is added between collecting and learning."""
    with Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = PQNPolicy.for_env(envs, seed=0, batch_size=64, epoch_per_collect=1)

        def pay_nothing(ctx: Any) -> None:
            ctx.trajectories["reward"] = torch.zeros_like(ctx.trajectories["reward"])

        outputs: list[Any] = []
        task.use(StepCollector(policy, envs, n_sample=64)).use(pay_nothing)
        task.use(OnPolicyLearner(policy)).use(lambda ctx: outputs.extend(ctx.train_output))
        task.run(max_step=1)
    (output,) = outputs
    with torch.no_grad():
        largest = 0.99 * policy.model(torch.zeros(1, 4))["logit"].abs().max() + 0.5
    assert abs(output["target_q_value"]) < largest


def test_collecting_takes_random_actions_with_the_probability_eps() -> None:
    policy = PQNPolicy({"model": MODEL, "seed": 0})
    obs = torch.zeros(3000, 4)
    for eps, share in ((0.0, 0.0), (0.3, 0.2), (1.0, 2 / 3)):
        action = policy.collect_mode.forward(obs, eps=eps)["action"]
        best = policy.eval_mode.forward(obs)["action"]
        assert (action != best).float().mean().item() == pytest.approx(share, abs=0.03)


def chain(envs: Any, **options: Any) -> tuple[PQNPolicy, list[Any]]:
    policy = PQNPolicy.for_env(
        envs,
        seed=0,
        model={"encoder_hidden_sizes": [64, 64]},
        learning_rate=1e-3,
        epoch_per_collect=4,
        trace_decay=0.95,
        eps=Schedule.linear(1.0, 0.05, decay=30_000),
        **options,
    )
    collector = StepCollector(policy, envs, n_sample=2048)
    return policy, [EpsGreedyHandler(policy), collector, OnPolicyLearner(policy)]


@pytest.mark.learning
@pytest.mark.parametrize("on_host", mostly_slow([False, True], keep=1))
def test_it_learns_to_balance_a_pole(on_host: bool) -> None:
    with Task(OnlineRLContext(), seed=0) as task:
        if on_host:
            envs: Any = make_env_manager("CartPole-v1", env_num=32, seed=0)
        else:
            envs = VectorEnvManager(lambda: CartPole(32), 32, seed=0)
        policy, parts = chain(envs)
        for part in parts:
            task.use(part)
        task.run(max_step=30)
    with make_env_manager("CartPole-v1", env_num=10, seed=1) as judged:
        assert np.mean(evaluate_episodes(policy, judged, 20).get_episode_return()) > 400


def test_tensors_of_envs_give_the_rows_that_it_learns_from() -> None:
    envs = VectorEnvManager(lambda: CartPole(4), 4, seed=0)
    with envs:
        policy = PQNPolicy.for_env(envs, seed=0, model={"encoder_hidden_sizes": [16]})
        rows = RolloutCollector(policy, envs).collect(64)
    rows = policy.add_returns(rows)
    wanted = returns_of_algorithm_1(policy, rows, 0.99, 0.65)
    torch.testing.assert_close(rows["ret"], wanted)


def test_targets_leave_the_statistics_of_a_network_as_they_are() -> None:
    policy = made(model={**MODEL, "norm": "batch_renorm"})
    rows = policy.add_returns(lanes())
    batch = as_tree({name: rows[name].flatten(0, 1) for name in ("obs", "action", "ret")})
    policy.learn_mode.forward(batch)
    before = [value.clone() for value in policy.model.buffers()]
    policy.add_returns(lanes())
    assert all(map(torch.equal, before, policy.model.buffers()))
