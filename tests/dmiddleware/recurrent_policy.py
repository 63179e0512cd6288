"""A recurrent policy (a GRU), and an env that needs one: CartPole without velocities."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from dmiddleware.data import index_rows
from dmiddleware.env import make_env_manager
from dmiddleware.policy import Component, Policy, PolicySettings, adam
from dmiddleware.rl import Categorical, gae
from dmiddleware.settings import Count

HIDDEN = 32


def positions_only():
    """Make a CartPole env whose observations are the position and the angle."""
    env = gym.make("CartPole-v1")
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


def masked_cartpole(env_num, **options):
    return make_env_manager(positions_only, env_num=env_num, **options)


class GRUNet(nn.Module):
    """Observation, previous action and state to logits, value and the next state."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, HIDDEN)
        self.gru = nn.GRUCell(HIDDEN, HIDDEN)
        self.actor = nn.Linear(HIDDEN, 2)
        self.critic = nn.Linear(HIDDEN, 1)

    def forward(self, obs, prev_action, is_first, state):
        before = nn.functional.one_hot(prev_action, 2) * ~is_first.unsqueeze(-1)
        seen = torch.cat([obs * obs.new_tensor([1.0, 10.0]), before], -1)
        state = self.gru(torch.tanh(self.encoder(seen)), state)
        return {
            "logit": self.actor(state),
            "value": self.critic(state).squeeze(-1),
            "state": state,
        }

    def unroll(self, batch, state):
        """Run over lanes ``[T, E, …]`` from the state of their first rows."""
        steps = []
        for t in range(len(batch["obs"])):
            is_first = batch["is_first"][t]
            state = state * ~is_first.unsqueeze(-1)
            steps.append(self(batch["obs"][t], batch["prev_action"][t], is_first, state))
            state = steps[-1]["state"]
        return {key: torch.stack([step[key] for step in steps]) for key in steps[0]}


class GRUSettings(PolicySettings):
    """The settings of :class:`GRUPolicy`."""

    batch_size = 5
    epoch_per_collect: Count = 1


class GRUPolicy(Policy):
    """PPO over whole lanes, through time from the stored state of the first row."""

    cfg: GRUSettings
    act_inputs = ("prev_action", "is_first")
    learn_columns = (
        "obs",
        "action",
        "log_prob",
        "value",
        "reward",
        "next_obs",
        "done",
        "terminated",
    )
    optional_columns = ()
    minibatch_unit = "lanes"

    def __init__(self, seed=0, *, cuda=False):
        torch.manual_seed(seed)
        super().__init__({"seed": seed, "cuda": cuda}, GRUNet())

    def initial_state(self, n):
        return torch.zeros(n, HIDDEN)

    def make_components(self):
        return {"net": Component(self.model, adam(3e-3), grad_clip_norm=0.5, acts=True)}

    def act_collect(self, obs, env_id, *, prev_action, is_first, state):
        output = self.model(obs, prev_action, is_first, state)
        # Drawn on the CPU, so the draws are the same with and without a GPU.
        distribution = Categorical(output["logit"].cpu())
        action = distribution.sample(self.generator)
        return {"action": action, "log_prob": distribution.log_prob(action), **output}

    def act_eval(self, obs, env_id, *, prev_action, is_first, state):
        output = self.model(obs, prev_action, is_first, state)
        return {"action": output["logit"].argmax(-1), "state": output["state"]}

    def learn(self, batch):
        adv, ret = self._advantages(batch)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(4):
            output = self.model.unroll(batch, batch["state"][0])
            distribution = Categorical(output["logit"])
            ratio = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
            gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            error = (output["value"] - ret).square().mean()
            entropy = distribution.entropy().mean()
            self.components["net"].step(0.5 * error - gain - 0.01 * entropy)
        self.train_iter += 1
        return {"total_loss": error.item()}

    @torch.no_grad()
    def _advantages(self, batch):
        """Estimate advantages; where no row follows, the net runs on to the successor."""
        cut = batch["done"].clone()
        cut[-1] = True
        after = self.model.unroll(batch, batch["state"][0])["state"][cut]
        last = index_rows(batch, cut)
        first = torch.zeros(len(after), dtype=torch.bool)
        value = self.model(last["next_obs"], last["action"], first, after)["value"]
        following = batch["value"].roll(-1, 0)
        following[cut] = value
        return gae(
            0.05 * batch["reward"],
            batch["value"],
            following,
            batch["terminated"],
            cut,
            discount=0.99,
            gae_lambda=0.95,
        )
