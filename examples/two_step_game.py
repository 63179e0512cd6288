"""QMIX or VDN on the two-step game of the QMIX paper (Rashid et al., 2018, section 5).

The first agent's first action leads to a game that pays 7 for anything, or to one that pays 8 if
both agents choose B, but 0 or 1 otherwise. A sum of the agents' values cannot represent the second
game, so VDN is content with 7.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import AgentSpaces, EnvSettings, make_env_manager, team_spaces
from dmiddleware.policy import Policy, PolicySettings, QMIXSettings, VDNSettings, get_policy_cls
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

Algo = Literal["qmix", "vdn"]
MODEL = {"encoder_hidden_sizes": [64]}
# As in the paper, all joint actions are seen equally often.
POLICIES: dict[Algo, PolicySettings] = {
    "qmix": QMIXSettings(model=MODEL, learning_rate=2e-3, target_update_freq=100, eps=1.0),
    "vdn": VDNSettings(model=MODEL, learning_rate=2e-3, target_update_freq=100, eps=1.0),
}
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


ENV = EnvSettings("examples.two_step_game:TwoStepGame", env_num=8)


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "qmix",
    seed: int = 0,
) -> Policy:
    """Build the agents' network of one hidden layer, and the mixing network."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "two_step_game",
    max_env_step: Count = 10_000,
    algo: Algo = "qmix",
    env: EnvSettings = ENV,
    eval_env_num: Count = 4,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=64),
    buffer: TensorBufferSettings = TensorBufferSettings(10_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=16),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=4, every_train_iter=320
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train QMIX or VDN on the two-step game, in which the best agent gets 8.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: the algorithm.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, algo, seed)
    replay = TensorBuffer(**vars(replace(buffer, seed=seed)))
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner(agent, replay, **vars(learner)))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
