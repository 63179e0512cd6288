"""QMIX or VDN on the two-step game of the QMIX paper (Rashid et al., 2018, section 5).

The first agent's first action leads to a game that pays 7 for anything, or to one that pays 8 if
both agents choose B, but 0 or 1 otherwise. A sum of the agents' values cannot represent the second
game, so VDN is content with 7.
"""

from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import AgentSpaces, make_env_manager, team_spaces
from dmiddleware.policy import QMIXPolicy, VDNPolicy
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    TerminationChecker,
)

Algorithm = Literal["qmix", "vdn"]
POLICIES = {"qmix": QMIXPolicy, "vdn": VDNPolicy}
# By the second state, and the actions of both agents (table 1 of the paper).
PAYOFF = np.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])


class TwoStepGame(gym.Env[dict[str, Any], Any]):
    """Two agents, two actions each, two steps. Both agents see the state."""

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
        reward = PAYOFF[self._state - 1, action[0], action[1]]
        return self._obs(), np.full(2, reward), True, False, {}

    def _obs(self) -> dict[str, Any]:
        state = np.eye(3, dtype=np.float32)[self._state]
        return {
            "agents": np.stack([state, state]),
            "agent_mask": np.ones(2, np.int8),
            "state": state,
        }


ENV = TwoStepGame


def make_policy(seed: int = 0, algo: Algorithm = "qmix") -> VDNPolicy:
    """Build the agents' network of one hidden layer, and the mixing network."""
    return POLICIES[algo].for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        model={"encoder_hidden_sizes": [64]},
        learning_rate=2e-3,
        target_update_freq=100,
        eps=1.0,  # as in the paper: all joint actions are seen equally often
    )


def main(
    seed: int = 0,
    exp_name: str = "two_step_game",
    max_env_step: int = 10_000,
    algo: Algorithm = "qmix",
) -> ExperimentResult:
    """Train QMIX or VDN on the two-step game, in which the best policy gets 8."""
    policy = make_policy(seed, algo)
    buffer = TensorBuffer(max_env_step, seed=seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=4, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=64))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=16))
        task.use(InteractionEvaluator(policy, eval_env, n_episode=4, every_train_iter=320))
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
