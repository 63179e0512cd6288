"""The parameters of a program become the options of its command line."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import yaml

from dmiddleware.command_line import (
    DefaultsBy,
    arguments_of,
    called_as,
    program_call,
)
from dmiddleware.data import TensorBufferSettings
from dmiddleware.env import EnvSettings
from dmiddleware.errors import ConfigError
from dmiddleware.policy import (
    DQNSettings,
    MAPPOSettings,
    PolicySettings,
    RainbowSettings,
    SACSettings,
)
from dmiddleware.schedule import Schedule
from dmiddleware.settings import Count, Counts, Settings, Whole, from_plain, plain_values
from dmiddleware.yaml_text import yaml_text

POLICY = DQNSettings(n_step=3, learning_rate=2e-3, model={"encoder_hidden_sizes": [128, 128]})


def train(
    seed: Whole = 0,
    max_env_step: Count = 60_000,
    algo: Literal["dqn", "c51"] = "dqn",
    env: EnvSettings = EnvSettings("CartPole-v1", env_num=8),
    policy: DQNSettings = POLICY,
    buffer: TensorBufferSettings = TensorBufferSettings(50_000),
) -> None:
    """Train a policy.

    Args:
        seed: seed of everything
            random.
        max_env_step: environment steps at most.
    """


def rainbow(policy: RainbowSettings = RainbowSettings()) -> None: ...
def sac(policy: SACSettings = SACSettings()) -> None: ...
def mappo(policy: MAPPOSettings = MAPPOSettings()) -> None: ...


ALGOS: dict[str, PolicySettings] = {"dqn": DQNSettings(n_step=5), "sac": SACSettings()}


def choose(
    algo: Literal["dqn", "sac"] = "dqn",
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", ALGOS)] = None,
) -> None: ...


def by_env(
    env: EnvSettings = EnvSettings("CartPole-v1", env_num=8),
    policy: Annotated[
        PolicySettings | None, DefaultsBy("env.id", {"CartPole-v1": DQNSettings()})
    ] = None,
) -> None: ...


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text, without the boxes around it."""
    captured = capsys.readouterr()
    text = (captured.out + captured.err).translate(str.maketrans("│╭╮╰╯─", "      "))
    return " ".join(text.split())


def refused(
    capsys: pytest.CaptureFixture[str], main: Callable[..., Any], *arguments: str, code: int = 2
) -> str:
    """Return the message that a command line is refused with."""
    with pytest.raises(SystemExit) as stopped:
        arguments_of(main, arguments)
    assert stopped.value.code == code
    return words(capsys)


def test_without_arguments_the_defaults_hold() -> None:
    assert arguments_of(train, []) == {
        "seed": 0,
        "max_env_step": 60_000,
        "algo": "dqn",
        "env": EnvSettings("CartPole-v1", env_num=8),
        "policy": POLICY,
        "buffer": TensorBufferSettings(50_000),
    }


def test_options_replace_single_settings() -> None:
    found = arguments_of(
        train,
        [
            "--policy.learning-rate",
            "3e-4",
            "--buffer.size",
            "2e4",
            "--seed",
            "3",
            "--env.id",
            "Acrobot-v1",
            "--policy.no-double",
            "--algo",
            "c51",
        ],
    )
    assert (found["seed"], found["buffer"].size, found["algo"]) == (3, 20_000, "c51")
    assert found["policy"] == DQNSettings(
        **{**vars(POLICY), "learning_rate": 3e-4, "double": False}
    )
    assert found["env"] == EnvSettings("Acrobot-v1", env_num=8)


def test_settings_of_several_values_and_inherited_ones_are_options() -> None:
    assert arguments_of(sac, ["--policy.action-low", "-1", "2"])["policy"].action_low == (-1, 2)
    found = arguments_of(rainbow, ["--policy.batch-size", "8", "--policy.eps", "0.1"])
    assert found["policy"] == RainbowSettings(batch_size=8, eps=0.1)


def test_a_schedule_is_written_like_a_call() -> None:
    found = arguments_of(sac, ["--policy.learning-rate-q", "linear(1e-3,0,1000)"])
    assert found["policy"].learning_rate_q == Schedule.linear(1e-3, 0, decay=1000)


def test_options_by_name_keep_those_that_are_not_named() -> None:
    found = arguments_of(
        train,
        ["--policy.model", "dueling=true", "norm=layer", "--env.env-kwargs", "sizes=[1, 2]"],
    )
    model = {"encoder_hidden_sizes": [128, 128], "dueling": True, "norm": "layer"}
    assert found["policy"].model == model
    assert found["env"].env_kwargs == {"sizes": [1, 2]}


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (train, "--seed -1", "seed must be an integer ≥ 0, got -1"),
        (train, "--max-env-step 1.5", "1.5 is not an integer"),
        (train, "--algo sarsa", "sarsa"),
        (train, "--polcy.learning-rate 1", "--policy.learning-rate"),
        (train, "--policy.model dueling", "write name=value"),
        (train, "--env.env-num 0", "env_num must be an integer ≥ 1, got 0"),
        (sac, "--policy.batch-size 0", "batch_size must be an integer ≥ 1, got 0"),
        (sac, "--policy.learning-rate-q linear(1,-1,9)", "must be a number ≥ 0, got -1"),
        (sac, "--policy.learning-rate-q line(1,0)", "a schedule must be like linear"),
        (sac, "--policy.action-bounding clip", "clip"),
        (sac, "--policy.batchsize 3", "--policy.batch-size"),
        (mappo, "--policy.reward-norm", "reward_norm must be False with several agents"),
    ],
)
def test_wrong_arguments_are_refused(
    main: Callable[..., Any], arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, main, *arguments.split())


@pytest.mark.parametrize("option", ["--buffer.n-step", "--buffer.seed", "--env.seed"])
def test_what_the_program_sets_itself_is_not_an_option(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Unrecognized" in refused(capsys, train, option, "3")


def test_the_help_has_meaning_range_and_default_from_the_declaration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refused(capsys, train, "--help", code=0)
    assert "Train a policy." in text
    assert "--seed INT Seed of everything random. An integer ≥ 0. (default: 0)" in text
    assert "Number of rewards in an n-step target. An integer ≥ 1. (default: 3)" in text
    assert "--policy.learning-rate FLOAT|SCHEDULE Adam's learning rate." in text
    assert "--buffer.size INT Capacity in rows. An integer ≥ 1. (default: 50000)" in text


def test_a_config_file_has_the_defaults_that_options_override(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    eps = {"type": "linear", "start": 1.0, "end": 0.1, "decay": 100}
    file.write_text(yaml.safe_dump({"seed": 7, "policy": {"n_step": 5, "eps": eps}}))
    found = arguments_of(train, ["--config", str(file), "--seed", "8", "--policy.batch-size", "8"])
    assert (found["seed"], found["policy"].n_step, found["policy"].batch_size) == (8, 5, 8)
    assert found["policy"].eps == Schedule.linear(1.0, 0.1, decay=100)
    assert found["policy"].learning_rate == POLICY.learning_rate


def measure(
    n: int = 1,
    limit: float | None = 2.0,
    sizes: tuple[int, ...] = (1,),
    pair: tuple[int, float] = (1, 2.0),
    options: Mapping[str, Any] = {},
    policy: DQNSettings = POLICY,
) -> None: ...


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--policy.gamma", "did you mean --policy.discount?"),
        ("--policy.lr=1e-3", "did you mean --policy.learning-rate?"),
        ("--policy.exploration-final-eps", "did you mean --policy.eps?"),
        ("--gamma", "did you mean --policy.discount?"),
        ("--total_timesteps", "did you mean --max-env-step?"),
        ("--num-envs", "did you mean --env.env-num?"),
        ("--policy.buffer-size", "did you mean --buffer.size?"),
        ("--policy.ent-coef", "entropy_weight or alpha, an option of the policies that have it"),
        ("--policy.net-arch", "a key of the policy's model"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(
    option: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = option.partition("=")[0].replace("_", "-")
    found = refused(capsys, train, *option.split("="), *([] if "=" in option else ["3"]))
    assert f"option {name}; " in found
    assert ours in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {gamma: 0.9}", "policy: unknown option gamma; did you mean discount?"),
        ("gamma: 0.9", "unknown option gamma; did you mean policy.discount?"),
        ("buffer: {buffer_size: 9}", "buffer: unknown option buffer_size; did you mean size?"),
        ("total_timesteps: 1e6", "unknown option total_timesteps; did you mean max_env_step?"),
        ("n_envs: 4", "unknown option n_envs; did you mean env.env_num?"),
    ],
)
def test_an_option_of_another_library_in_a_file_is_answered_with_ours(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    found = refused(capsys, train, "--config", str(file))
    assert "".join(message.split()) in "".join(found.split())


def test_an_option_that_is_chosen_by_another_is_answered_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--algo", "sac", "--policy.ent-coef", "1")
    assert "did you mean --policy.alpha?" in refused(capsys, choose, *line)
    file = tmp_path / "c.yaml"
    file.write_text("{algo: dqn, tau: 0.1}")
    text = refused(capsys, choose, "--config", str(file))
    assert "unknown option tau; did you mean policy.target_tau?" in text


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["goal=1e-3"], {"goal": 0.001}),
        (["a=None", "b=1e6", "c=-2E-4"], {"a": None, "b": 1e6, "c": -0.0002}),
        (["a=[1e-3, None, true]"], {"a": [0.001, None, True]}),
        (["a={x: {y: 5e-1}, z: ['1e-3']}"], {"a": {"x": {"y": 0.5}, "z": ["1e-3"]}}),
        (["at=12:30", "map=4x4"], {"at": "12:30", "map": "4x4"}),
    ],
)
def test_options_by_name_have_numbers_and_none(
    words: list[str], value: dict[str, Any], tmp_path: Path
) -> None:
    given = arguments_of(train, ["--env.env-kwargs", *words])
    assert given["env"].env_kwargs == value
    file = tmp_path / "config.yaml"
    items = "\n".join(f"    {word.replace('=', ': ', 1)}" for word in words)
    file.write_text(f"env:\n  env_kwargs:\n{items}\n")
    assert arguments_of(train, ["--config", str(file)])["env"].env_kwargs == value
    with called_as(train, given):
        call = program_call()
    assert call is not None
    file.write_text(yaml_text({"arguments": call.plain()}))
    assert arguments_of(train, ["--config", str(file)]) == given


def test_a_file_has_numbers_as_the_command_line_has_them(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "{n: 1e6, limit: None, sizes: [1e2, 3], pair: [1e1, 2], options: {a: [1e-3]},\n"
        "policy: {learning_rate: 1e-4, target_update_freq: 1e3,\n"
        'eps: "linear(1.0, 5e-2, 1e4)"}}'
    )
    found = arguments_of(measure, ["--config", str(file)])
    line = "--n 1e6 --limit None --sizes 1e2 3 --pair 1e1 2 --policy.learning-rate 1e-4"
    line += " --policy.target-update-freq 1e3 --policy.eps linear(1.0,5e-2,1e4)"
    assert found == arguments_of(measure, [*line.split(), "--options", "a=[1e-3]"])
    assert repr((found["n"], found["sizes"], found["pair"])) == "(1000000, (100, 3), (10, 2.0))"


@pytest.mark.parametrize(
    "schedule",
    [
        '{type: linear, start: "1e-3", end: 0}',
        "{type: cosine, start: 1e-3, end: zero}",
        "{start: 1e-3, last: 0}",
        "{type: piecewise, points: [[0, '1e-3']]}",
        "linear(1e-3, 0, decya=5)",
    ],
)
def test_a_wrong_schedule_in_a_file_names_file_and_option(
    schedule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"policy:\n  learning_rate: {schedule}\n")
    assert "c.yaml: policy.learning_rate: " in refused(capsys, train, "--config", "c.yaml")


def test_the_arguments_of_a_call_are_those_of_the_next(tmp_path: Path) -> None:
    line = ["--policy.model", "dueling=true", "--policy.eps", "linear(1,0.1,9)", "--seed", "4"]
    given = arguments_of(train, line)
    with called_as(train, given):
        call = program_call()
    assert call is not None
    assert call.program == f"{__name__}.train"
    assert "seed" not in call.plain()["buffer"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"arguments": call.plain(), "policy": {"type": "dqn"}}))
    assert arguments_of(train, [f"--config={file}"]) == given
    assert program_call() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede: 3", "unknown option sede; did you mean seed?"),
        ("policy: {learnin_rate: 1.0}", "policy: unknown option learnin_rate; did you mean learni"),
        ("policy: {batch_size: 0}", "batch_size must be an integer ≥ 1, got 0"),
        ("buffer: {n_step: 3}", "buffer: unknown option n_step"),
        ("seed: -1", "seed must be an integer ≥ 0, got -1"),
        ("policy: 3", "policy"),
        ("[1, 2]", "must have options by name"),
        ("a: [", "cannot read"),
    ],
)
def test_a_wrong_config_file_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    found = refused(capsys, train, "--config", str(file))
    assert "".join(message.split()) in "".join(found.split())


def test_a_missing_config_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read nowhere.yaml" in refused(capsys, train, "--config", "nowhere.yaml")


def test_defaults_can_depend_on_another_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = arguments_of(choose, ["--policy.batch-size", "8", "--algo", "sac"])
    assert found == {"algo": "sac", "policy": SACSettings(batch_size=8)}
    assert arguments_of(choose, [])["policy"] == ALGOS["dqn"]
    with called_as(choose, found):
        call = program_call()
    assert call is not None
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"arguments": call.plain()}))
    assert arguments_of(choose, ["--config", str(file)]) == found
    assert "--policy.alpha" in refused(capsys, choose, "--help", "--algo", "sac", code=0)
    assert "Unrecognized" in refused(capsys, choose, "--policy.alpha", "1", "--algo", "dqn")
    assert "env.id must be one of CartPole-v1" in refused(capsys, by_env, "--env.id", "Ant-v5")


class Color(enum.Enum):
    """Members whose values no file holds."""

    RED = object()
    BLUE = (1, 2)


class Level(enum.IntEnum):
    """Members that are numbers."""

    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    """Members that may be combined."""

    READ = 1
    WRITE = 2


class Noise(Settings):
    """A group that a program may have."""

    color: Color = Color.RED
    file: Path | None = None
    sizes: Counts = ()


class Delay(Settings):
    """Another group."""

    steps: Count = 1
    noise: Noise | None = None


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Box:
    """A dataclass that is not a class of settings."""

    file: Path
    color: Color = Color.RED


KINDS: list[tuple[Any, Any]] = [
    (Color, Color.BLUE),
    (Color | None, Color.RED),
    (Level, Level.HIGH),
    (Rights, Rights.READ | Rights.WRITE),
    (Literal[Color.RED, Color.BLUE], Color.BLUE),
    (Literal["a", 1], 1),
    (Noise | None, Noise(color=Color.BLUE, file=Path("x"), sizes=(1, 2))),
    (Noise | None, None),
    (Noise | Delay | None, Delay(steps=3, noise=Noise(color=Color.BLUE))),
    (Delay, Delay(noise=Noise(file=Path("y")))),
    (Path | None, Path("a/b")),
    (tuple[Path, ...], (Path("a"), Path("b"))),
    (list[Path], [Path("a")]),
    (tuple[Color, int] | None, (Color.BLUE, 3)),
    (tuple[tuple[int, int], ...], ((1, 2), (3, 4))),
    (list[tuple[str, Level]], [("a", Level.LOW)]),
    (set[int], {1, 2}),
    (frozenset[Color], frozenset({Color.RED})),
    (dict[str, Path], {"a": Path("b")}),
    (dict[int, float], {1: 2.0}),
    (dict[Color, int], {Color.RED: 1}),
    (Mapping[str, Noise], {"a": Noise(sizes=(3,))}),
    (list[Noise], [Noise(color=Color.BLUE)]),
    (Point, Point(3, "z")),
    (Box, Box(Path("x"), Color.BLUE)),
    (Schedule | float, Schedule.linear(1, 0, decay=9)),
    (tuple[Schedule, ...], (Schedule.piecewise([(0, 1.0), (5, 0.5)]),)),
    (datetime.datetime, datetime.datetime(2020, 1, 2, 3, 4, 5, 678)),
    (datetime.date, datetime.date(2020, 1, 2)),
    (datetime.timedelta, datetime.timedelta(days=1, seconds=2)),
    (bytes, b"ab\xff"),
    (complex, 1 + 2j),
    (int | str, "3"),
    (str, "2020-01-02"),
    (EnvSettings, EnvSettings("CartPole-v1", env_num=2, wrappers=["a:B(c=1)", "d:E"])),
]


@pytest.mark.parametrize(("hint", "value"), KINDS, ids=map(str, range(len(KINDS))))
def test_what_a_run_saves_of_each_kind_of_parameter_is_read_back(
    hint: Any, value: Any, tmp_path: Path
) -> None:
    def program(option: Any, seed: int = 0) -> None: ...

    program.__annotations__["option"] = hint
    with called_as(program, {"option": value, "seed": 3}):
        call = program_call()
    assert call is not None
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"arguments": call.plain()}))
    again = arguments_of(program, ["--config", str(tmp_path / "config.yaml")])
    assert again == {"option": value, "seed": 3}
    assert type(again["option"]) is type(value)
    assert from_plain(hint, yaml.safe_load(yaml.safe_dump(plain_values(value)))) == value


def grouped(noise: Noise | None = None, delay: Delay = Delay()) -> None: ...


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise: {coler: RED}", "noise: unknown option coler; did you mean color?"),
        ("noise: {color: GREEN}", "noise: Noise: color must be"),
        ("noise: 3", "noise must have options by name"),
        ("delay: null", "delay must have options by name"),
        ("delay: {noise: {sizes: [0]}}", "delay.noise: Noise: sizes must be"),
        ("delay: {steps: '<unsaved: object object>'}", "delay.steps was <unsaved: object"),
    ],
)
def test_wrong_values_of_a_group_are_refused_with_their_path(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    shown = refused(capsys, grouped, "--config", str(file))
    assert "".join(message.split()) in "".join(shown.split())


def test_parameters_without_types_are_refused() -> None:
    def main(seed=0):  # type: ignore[no-untyped-def]
        """Train."""

    with pytest.raises(ConfigError, match="seed has no type"):
        arguments_of(main, [])
