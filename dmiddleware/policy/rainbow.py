"""Rainbow: the extensions of DQN combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dmiddleware.policy.distributional_dqn import C51Policy, C51Settings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Epsilon
from dmiddleware.schedule import LearningRate

__all__ = ["RainbowPolicy", "RainbowSettings"]


class RainbowSettings(C51Settings):
    """The settings of Rainbow."""

    priority = True
    n_step = 3
    batch_size = 32
    learning_rate: LearningRate = 6.25e-5
    adam_eps = 1.5e-4
    target_update_freq = 2000
    eps: Epsilon = 0.0


@POLICY_REGISTRY.register("rainbow")
class RainbowPolicy(C51Policy):
    """Rainbow (Hessel et al., "Rainbow: Combining Improvements in Deep RL", 2018).

    :class:`C51Policy` with what the paper adds, all of it by default:

    - double Q-learning chooses the target's action (``double``);
    - the target is a 3-step return (``n_step``), which the buffer computes;
    - a dueling network gives the distributions: its streams are joined for each atom
      (``model.dueling``);
    - noisy layers explore instead of ε-greedy actions (Fortunato et al., 2018: ``model.noisy``), so
      that a chain needs no ``EpsGreedyHandler``. Evaluating is without noise;
    - the divergence from the target is the priority (``priority``). The buffer needs a
      :class:`~dmiddleware.data.PrioritySampler`; the paper has ``alpha=0.5`` and a β that rises
      from 0.4 to 1.

    The defaults of the learning rate, Adam's ε, the batch size and the period of the target network
    are from table 1, where an update follows every fourth step. Differences from the paper:
    layers of the encoder have no noise, only those after it, and each environment has a draw of its
    own while collecting.
    """

    cfg: RainbowSettings
    model_defaults: ClassVar[Mapping[str, Any]] = {"dueling": True, "noisy": True}
