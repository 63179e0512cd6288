"""The commander of a serial program: chooses how to collect, from the training's progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dmiddleware.classic import CommandMode, CommandModePolicy, as_command_mode
from dmiddleware.classic.config import Configurable
from dmiddleware.worker.collector import ISerialCollector
from dmiddleware.worker.evaluator import ISerialEvaluator
from dmiddleware.worker.learner import BaseLearner

__all__ = ["BaseSerialCommander"]


class BaseSerialCommander(Configurable):
    """Asks the policy's command mode for the keyword arguments of the next collection.

    Args:
        cfg: there is nothing to configure.
        learner: the policy decides from its ``learn_info``,
        collector: from its ``envstep``,
        evaluator: and from its ``last_eval``; None if the program does not evaluate.
        replay_buffer: the buffer, for subclasses.
        policy: a policy with a command mode, or the mode; may be set later.

    Raises:
        ConfigError: for an unusable config, or a policy without a command mode.
    """

    config: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        cfg: Mapping[str, Any] | None,
        learner: BaseLearner,
        collector: ISerialCollector[Any, Any],
        evaluator: ISerialEvaluator[Any, Any] | None,
        replay_buffer: Any,
        policy: CommandModePolicy | CommandMode | None = None,
    ) -> None:
        self._cfg = self.merged_config(cfg)
        self._learner = learner
        self._collector = collector
        self._evaluator = evaluator
        self._replay_buffer = replay_buffer
        self._info: dict[str, Any] = {}
        self._policy = None if policy is None else as_command_mode(policy, user=type(self).__name__)

    def step(self) -> dict[str, Any]:
        """Return the keyword arguments of the next collect forward, such as ``eps``.

        The policy gets the learner's ``learn_info``, ``train_iter``, ``envstep`` and
        ``eval_value``, the result of the last evaluation (None before the first one).

        Raises:
            ConfigError: if no policy was set.
        """
        self._info.update(self._learner.learn_info)
        self._info["train_iter"] = self._learner.train_iter
        self._info["envstep"] = self._collector.envstep
        self._info["eval_value"] = None if self._evaluator is None else self._evaluator.last_eval
        return self.policy.get_setting_collect(self._info)

    @property
    def policy(self) -> CommandMode:
        """The policy's command mode.

        Raises:
            ConfigError: if no policy was set.
        """
        return as_command_mode(self._policy, user=type(self).__name__)

    @policy.setter
    def policy(self, policy: CommandModePolicy | CommandMode) -> None:
        self._policy = as_command_mode(policy, user=type(self).__name__)
