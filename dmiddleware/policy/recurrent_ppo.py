"""Proximal policy optimization with a memory."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from dmiddleware.data.minibatches import MinibatchUnit
from dmiddleware.errors import StructureError
from dmiddleware.policy.network_outputs import value_output
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.ppo import PPOPolicy, PPOSettings
from dmiddleware.policy.recurrent import Memory
from dmiddleware.tree import Batch, Columns, Nested, Value, stack

__all__ = ["RecurrentPPOPolicy", "RecurrentPPOSettings"]


class RecurrentPPOSettings(PPOSettings):
    """The settings of PPO with a recurrent network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not self.recompute_advantage,
            "recompute_advantage",
            "False for a recurrent policy, which would have to run all lanes again",
        )


@POLICY_REGISTRY.register("ppo_recurrent")
class RecurrentPPOPolicy(PPOPolicy):
    """PPO whose actor and critic share an LSTM or a GRU.

    As :class:`PPOPolicy`, with the details of recurrent PPO in Huang et al., "The 37 Implementation
    Details of PPO" (2022), section 4: states start at zero and are reset where an episode starts,
    minibatches consist of whole lanes ``[T, B, …]`` of envs, and each lane is run again from the
    state that was stored with its first row, so the gradient flows back to that row.

    The model is a :class:`~dmiddleware.model.RecurrentActorCritic`, or another
    :class:`~dmiddleware.model.RecurrentNetwork` with its outputs. Learns also from the columns
    ``state`` ``[T, B, S]``, of which the first row is used, ``is_first``, ``prev_action`` and
    ``prev_reward``. Where no row of the same episode follows a row, the model runs on from the
    state of this row to value its successor.

    ``recompute_advantage`` is not supported.
    """

    cfg: RecurrentPPOSettings
    model_type: ClassVar[str] = "recurrent_actor_critic"

    act_inputs: tuple[str, ...] = ("is_first", "prev_action", "prev_reward", "action_mask")
    minibatch_unit: ClassVar[MinibatchUnit] = "lanes"
    learn_columns: ClassVar[tuple[str, ...]] = (*PPOPolicy.learn_columns, "state", "is_first")

    def setup(self) -> None:
        """Build the memory."""
        super().setup()
        self.memory = Memory(
            self.model, self.codec, act_inputs=self.act_inputs, user=type(self).__name__
        )
        self.act_inputs = self.memory.act_inputs

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self.memory.initial_state(n)

    def acting_output(self, obs: Value, **inputs: Any) -> dict[str, torch.Tensor]:
        """Return the outputs for what acting sees."""
        return self.memory.run(obs, inputs, inputs["state"])

    def act_eval(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Act on the observations and the state; see :meth:`Policy.act_eval`."""
        # A network of the user's own may take no further keywords.
        acts_only = self.parts is not None or self.several_agents
        output = self.memory.run(obs, kwargs, kwargs["state"], acts_only=acts_only)
        generator = None if deterministic else self.eval_generator
        acted = self.acted(output, obs, action_mask, generator)
        return {**acted, "state": output["state"]}

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows that are not lanes."""
        if batch["adv"].dim() != 2 + self.several_agents:
            raise StructureError(
                f"{type(self).__name__} learns from lanes [T, B, …], but the column adv has shape "
                f"{tuple(batch['adv'].shape)}; use StepCollector and OnPolicyLearner"
            )
        return batch

    def learning_output(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return the outputs for lanes, run from the state before their first row."""
        return self.memory.run(batch["obs"], batch, batch["state"][0])

    def value_fn(self, obs: Nested, rows: Batch | None = None) -> torch.Tensor:
        """Return V of the successors of rows.

        Args:
            obs: the successors, ``[N, *obs_shape]``.
            rows: the rows ``[N, …]`` before them, with the state before each row.

        Returns:
            ``[N]`` float32, or ``[N, A]`` of several agents, where the rows are.

        Raises:
            StructureError: without rows, because an observation alone has no value.
        """
        if rows is None:
            raise StructureError(
                f"value_fn of {type(self).__name__} needs the rows before the observations, since "
                "a value depends on the state; use GAEEstimator, which passes them"
            )
        if self.model.training:
            self.model.eval()
        self.draw_near(obs)
        with torch.no_grad():
            inputs = {"is_first": stack([rows["is_first"], torch.zeros_like(rows["is_first"])])}
            for name, source in (("prev_action", "action"), ("prev_reward", "reward")):
                if name in rows:
                    inputs[name] = stack([rows[name], rows[source]])
            inputs = {name: self.as_obs(column) for name, column in inputs.items()}
            both = self.obs_norm(self.as_obs(stack([rows["obs"], obs])))
            output = self.memory.run(both, inputs, rows["state"].to(self.device))
            value = value_output(output, self.rows_of(both, 2))[1]
        return self.as_return(value).to(self.draw_device)
