"""Small environments: four that need a memory, two of them for several agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env import AgentSpaces, team_spaces

__all__ = ["Recall", "TeamRecall", "TwoStepGame", "cartpole_positions", "pendulum_positions"]

Obs: TypeAlias = npt.NDArray[np.float32]


def cartpole_positions(**options: Any) -> gym.Env[Obs, int]:
    """Make a CartPole-v1 whose observations are the position of the cart and the angle alone."""
    env = gym.make("CartPole-v1", **options)
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


def pendulum_positions(**options: Any) -> gym.Env[Obs, Obs]:
    """Make a Pendulum-v1 whose observations are the angle's cosine and sine, without its velocity.

    Ni et al., "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs" (2022), call it
    Pendulum-P (section 5.1).
    """
    env = gym.make("Pendulum-v1", **options)
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[:2], space)


class Recall(gym.Env[Obs, Any]):
    """A cue is shown once, and has to be named after a delay.

    The observation is the cue, one-hot, in the first step, zeros in the next ones, and a flag in
    the last step, in which the action that equals the cue gives a reward of 1. All other rewards
    are 0. What a network without a memory sees in the last step does not depend on the cue, so its
    best possible return is ``1 / n_cues`` on average; with a memory it is 1.

    Args:
        n_cues: number of cues and of actions.
        delay: number of steps between the cue and the last step.
    """

    def __init__(self, n_cues: int = 4, delay: int = 4) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (n_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(n_cues)
        self.n_cues, self._delay = n_cues, delay
        self._cue = self._t = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Show another cue."""
        super().reset(seed=seed)
        self._cue, self._t = int(self.np_random.integers(self.n_cues)), 0
        return self._seen(self._cue), {}

    def step(self, action: Any) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Move on by one step; in the last one, check the action."""
        self._t += 1
        is_over = self._t == self._delay + 2
        reward = float(is_over and int(action) == self._cue)
        is_question = self._t >= self._delay + 1
        return self._seen(self.n_cues if is_question else None), reward, is_over, False, {}

    def _seen(self, place: int | None) -> Obs:
        obs = np.zeros(self.n_cues + 1, np.float32)
        if place is not None:
            obs[place] = 1.0
        return obs


class TeamRecall(gym.Env[dict[str, Any], Any]):
    """:class:`Recall` for a team: each agent is shown a cue of its own.

    In the last step, all agents get the share of agents that name their cues. The state is all
    cues, in every step; a centralized critic sees it, and actors do not. Without memories, the best
    possible return is ``1 / n_cues`` on average; with a memory of each agent it is 1.

    Args:
        n_agent: number of agents.
        n_cues: number of cues and of actions.
        delay: number of steps between the cue and the last step.
    """

    def __init__(self, n_agent: int = 2, n_cues: int = 4, delay: int = 4) -> None:
        agent = AgentSpaces(
            n_agent,
            observation=spaces.Box(0.0, 1.0, (n_cues + 1,), np.float32),
            action=spaces.Discrete(n_cues),
            state=spaces.Box(0.0, 1.0, (n_agent * n_cues,), np.float32),
        )
        self.observation_space, self.action_space = team_spaces(agent)
        self._n_agent, self._n_cues, self._delay = n_agent, n_cues, delay
        self._cues, self._t = np.zeros(n_agent, np.int64), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show each agent another cue."""
        super().reset(seed=seed)
        self._cues, self._t = self.np_random.integers(self._n_cues, size=self._n_agent), 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Move on by one step; in the last one, check the actions."""
        self._t += 1
        is_over = self._t == self._delay + 2
        share = np.mean(action == self._cues) if is_over else 0.0
        return self._obs(), np.full(self._n_agent, share), is_over, False, {}

    def _obs(self) -> dict[str, Any]:
        one_hot = np.eye(self._n_cues + 1, dtype=np.float32)
        cues, agents = one_hot[self._cues], np.zeros((self._n_agent, self._n_cues + 1), np.float32)
        if self._t == 0:
            agents = cues
        elif self._t > self._delay:
            agents[:, -1] = 1.0
        return {
            "agents": agents,
            "agent_mask": np.ones(self._n_agent, np.int8),
            "state": cues[:, :-1].flatten(),
        }


# By the second state, and the actions of both agents (table 1 of Rashid et al., 2018).
_PAYOFF: Final = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])


class TwoStepGame(gym.Env[dict[str, Any], Any]):
    """The two-step game of Rashid et al. (2018): two agents, two actions each, two steps.

    Both agents see the state. The best return is 8; agents whose values add up get 7.
    """

    def __init__(self) -> None:
        state = gym.spaces.Box(0.0, 1.0, (3,))
        spaces = AgentSpaces(2, observation=state, action=gym.spaces.Discrete(2), state=state)
        self.observation_space, self.action_space = team_spaces(spaces)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start a game in the first state."""
        super().reset(seed=seed)
        self._state = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        """Take both agents' actions; the second step pays both the same."""
        if self._state == 0:
            self._state = 1 + int(action[0])
            return self._obs(), np.zeros(2), False, False, {}
        reward = _PAYOFF[self._state - 1, action[0], action[1]]
        return self._obs(), np.full(2, reward), True, False, {}

    def _obs(self) -> dict[str, Any]:
        state = np.eye(3, dtype=np.float32)[self._state]
        return {
            "agents": np.stack([state, state]),
            "agent_mask": np.ones(2, np.int8),
            "state": state,
        }


_MAKERS: Final[Mapping[str, Any]] = {
    "CartPolePositions-v1": cartpole_positions,
    "PendulumPositions-v1": pendulum_positions,
    "Recall-v0": Recall,
}
for _name, _make in _MAKERS.items():
    gym.register(_name, entry_point=_make, order_enforce=False, disable_env_checker=True)
