import pytest

from dmiddleware.classic import CommandMode, CommandModePolicy
from dmiddleware.errors import PolicyError


class Commanding(CommandModePolicy):
    def _init_command(self):
        self._commands = 0

    def _forward_learn(self, batch):
        return {}

    def _forward_collect(self, data):
        return data

    def _forward_eval(self, data):
        return data

    def _get_setting_collect(self, command_info):
        self._commands += 1
        return {"eps": 1 / command_info["envstep"]}


def test_the_commander_turns_progress_into_arguments(linear):
    mode = Commanding({}, model=linear()).command_mode
    assert isinstance(mode, CommandMode)
    assert mode._fields == ("get_setting_learn", "get_setting_collect", "get_setting_eval")
    assert mode.get_setting_collect({"envstep": 4}) == {"eps": 0.25}
    assert mode.get_setting_learn({"envstep": 4}) == {}
    assert mode.get_setting_eval({"envstep": 4}) == {}


@pytest.mark.parametrize("which", ["learn", "collect", "eval"])
def test_commanding_must_be_enabled(linear, which):
    policy = Commanding({}, model=linear(), enable_field=["learn", "collect"])
    with pytest.raises(PolicyError, match="cannot command; add 'command'"):
        getattr(policy.command_mode, f"get_setting_{which}")({"envstep": 1})


def test_a_commander_alone_is_built_without_the_rest(linear):
    policy = Commanding({}, model=linear(), enable_field="command")
    assert policy.command_mode.get_setting_collect({"envstep": 1}) == {"eps": 1.0}
