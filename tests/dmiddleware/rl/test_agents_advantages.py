"""Advantages of several agents."""

from __future__ import annotations

import torch

from dmiddleware.rl import with_advantages
from dmiddleware.tree import as_tree


def test_advantages_of_several_agents_are_those_of_each_agent_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    n_step, n_env, n_agent = 7, 3, 2
    shape = (n_step, n_env, n_agent)
    done = torch.rand(n_step, n_env, generator=generator) < 0.3
    terminated = done & (torch.rand(n_step, n_env, generator=generator) < 0.5)
    stays = torch.rand(shape, generator=generator) < 0.8
    next_values = torch.randn(shape, generator=generator)
    reward = torch.randn(shape, generator=generator)
    rows = as_tree(
        {
            "value": torch.randn(shape, generator=generator),
            "done": done,
            "terminated": terminated,
            "next_obs": {"agent_mask": stays.to(torch.int8), "value": next_values},
        }
    )
    settings = {"discount": 0.9, "gae_lambda": 0.8}
    got = with_advantages(rows, reward=reward, value_fn=lambda obs: obs["value"], **settings)
    for agent in range(n_agent):
        for env in range(n_env):
            adv = 0.0
            for t in reversed(range(n_step)):
                cut = bool(done[t, env]) or t == n_step - 1
                after = next_values[t, env, agent] if cut else rows["value"][t + 1, env, agent]
                gone = bool(terminated[t, env]) or not stays[t, env, agent]
                delta = reward[t, env, agent] + (0.0 if gone else 0.9 * after)
                delta = float(delta - rows["value"][t, env, agent])
                adv = delta + (0.0 if cut or gone else 0.9 * 0.8 * adv)
                torch.testing.assert_close(got["adv"][t, env, agent].item(), adv, atol=1e-5, rtol=0)
    torch.testing.assert_close(got["ret"], got["adv"] + rows["value"])
