"""A custom policy in the per-env style: observations by env id in, actions by env id out.

It is Q-learning with a target network. The base class derives the batched style, so the same
collectors, buffers and learners work with it. A policy written for batches is faster.
"""

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from dmiddleware import Task
from dmiddleware.classic import Policy
from dmiddleware.data import Batch, TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("CartPole-v1", env_num=8)


class PerEnvQPolicy(Policy):
    """Q-learning, written for one env at a time."""

    config: ClassVar[dict[str, Any]] = {
        "learning_rate": 2e-3,
        "discount_factor": 0.99,
        "nstep": 3,
        "learn": {"batch_size": 64},
        "other": {"eps": {"type": "linear", "start": 1.0, "end": 0.04, "decay": 5000}},
    }
    explores: ClassVar[bool] = False
    learn_from = "batch"

    def default_model(self) -> tuple[str, list[str]]:
        """Return the name of the library's Q-network."""
        return "q_network", ["dmiddleware.model"]

    def _init_learn(self) -> None:
        self._target = copy.deepcopy(self._model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=self._cfg.learning_rate)

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> dict[str, Any]:
        with torch.no_grad():
            best = self._model(batch["next_obs"])["logit"].argmax(-1, keepdim=True)
            future = self._target(batch["next_obs"])["logit"].gather(-1, best).squeeze(-1)
            future = future.masked_fill(batch["terminated"], 0.0)
            target = batch["reward"] + batch["discount"] * future
        q = self._model(batch["obs"])["logit"].gather(-1, batch["action"][:, None]).squeeze(-1)
        loss = F.smooth_l1_loss(q, target)
        self._check_finite(loss.item(), batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._train_iter += 1
        if self._train_iter % 64 == 0:
            self._target.load_state_dict(self._model.state_dict())
        return {"total_loss": loss.item(), "cur_lr": self._cfg.learning_rate}

    def _state_dict_learn(self) -> dict[str, Any]:
        # The base class saves the model, the optimizer, the number of updates and the generator.
        target = copy.deepcopy(self._target.state_dict())
        return {**super()._state_dict_learn(), "target": target}

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        super()._load_state_dict_learn(state_dict)
        self._target.load_state_dict(state_dict["target"])

    def _forward_collect(
        self, data: dict[int, Any], eps: float = 0.0, **kwargs: Any
    ) -> dict[int, dict[str, Any]]:
        actions = self._forward_eval(data)
        for output in actions.values():
            if torch.rand((), generator=self._generator) < eps:
                output["action"] = torch.randint(2, (), generator=self._generator)
        return actions

    def _forward_eval(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        logit = self._model(torch.stack(list(data.values())))["logit"]
        return {env_id: {"action": q.argmax()} for env_id, q in zip(data, logit, strict=True)}


def make_policy(seed: int = 0) -> PerEnvQPolicy:
    """Build the policy."""
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [128, 128]}
    return PerEnvQPolicy({"seed": seed, "model": model})


def main(
    seed: Whole = 0,
    exp_name: str = "custom_policy_per_env",
    max_env_step: Count = 60_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=640, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train a custom agent on CartPole-v1.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))

        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
