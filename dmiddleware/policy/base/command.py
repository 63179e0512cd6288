"""Policies with a command mode, which turns training progress into arguments of forward."""

from __future__ import annotations

from typing import Any, ClassVar

from dmiddleware.policy.base.modes import CommandMode
from dmiddleware.policy.base.policy import Policy

__all__ = ["CommandModePolicy"]


class CommandModePolicy(Policy):
    """A policy with a fourth mode, for commanders.

    ``_get_setting_learn``, ``_get_setting_collect`` and ``_get_setting_eval`` take the training's
    progress (``train_iter``, ``envstep``, evaluation results) and return keyword arguments for the
    mode's next forward, such as ``eps``.
    """

    config: ClassVar[dict[str, Any]] = {}
    fields: ClassVar[tuple[str, ...]] = ("learn", "collect", "eval", "command")
    command_function: ClassVar[type[CommandMode]] = CommandMode

    @property
    def command_mode(self) -> CommandMode:
        """The methods that a commander may call."""
        return self.command_function(
            get_setting_learn=self._public_setting_learn,
            get_setting_collect=self._public_setting_collect,
            get_setting_eval=self._public_setting_eval,
        )

    def _init_command(self) -> None:
        """Build what the command mode needs."""

    def _get_setting_learn(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next learn forward."""
        return {}

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next collect forward."""
        return {}

    def _get_setting_eval(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next eval forward."""
        return {}

    def _public_setting_learn(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require_command()
        return self._get_setting_learn(command_info)

    def _public_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require_command()
        return self._get_setting_collect(command_info)

    def _public_setting_eval(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require_command()
        return self._get_setting_eval(command_info)

    def _require_command(self) -> None:
        if "command" not in self._enabled:
            raise self._not_enabled("command")
