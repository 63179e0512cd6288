"""Exported policies act as the policies do, in tools that know nothing of this project."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from dmiddleware import load_policy
from dmiddleware.data import save_checkpoint
from dmiddleware.errors import ConfigError
from dmiddleware.launch.cli import ditask
from dmiddleware.policy import (
    BCQPolicy,
    BCSettings,
    DQNPolicy,
    PPOPolicy,
    QMIXPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
)
from dmiddleware.rollout import ActingPolicy
from dmiddleware.runs import export_policy, write_model_card
from dmiddleware.runs.export import SUFFIXES, ExportFormat
from tests.dmiddleware.env.optional import skip_without
from tests.dmiddleware.policy.every_policy import EVERY, env_for, made
from tests.dmiddleware.policy.grouped_envs import GROUPS, Parts
from tests.dmiddleware.runs.test_saved_policy import changed, saved
from tests.dmiddleware.team_envs import CountingTeam
from tests.variants import mostly_slow

skip_without("onnxruntime")
skip_without("onnxscript")
pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="the exporters of older versions of torch differ",
)


def policy_of(cls: Any) -> Any:
    norm = {"obs_norm": True} if hasattr(cls.settings_class(), "obs_norm") else {}
    return changed(made(cls, **norm))


class Onnx:
    """An exported policy in onnxruntime, with what it remembers."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.outputs = [one.name for one in self.session.get_outputs()]

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        names = [one.name for one in self.session.get_inputs()]
        found = self.session.run(None, {name: inputs[name] for name in names})
        return dict(zip(self.outputs, found, strict=True))


def flat(tree: Any, path: str) -> dict[str, Any]:
    if isinstance(tree, tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, part in tree.items() for k, v in flat(part, f"{path}.{name}").items()}


def test_onnx_gives_the_actions_of_every_policy_step_by_step(every: Any, tmp_path: Path) -> None:
    policy = policy_of(every)
    exported = export_policy(saved(policy, tmp_path / "p.safetensors"), tmp_path / "p.onnx")
    run, act = Onnx(exported.path), ActingPolicy(policy)
    env = env_for(every)
    obs, _ = env.reset(seed=1)
    kept = {
        one.name: np.zeros((1, *one.shape), one.dtype)
        for one in exported.inputs
        if not one.name.startswith("obs")
    }
    if "is_first" in kept:
        kept["is_first"][:] = True
    reward = 0.0
    for _ in range(6):
        rewards = {"prev_reward": reward} if "prev_reward" in policy.act_inputs else {}
        action = act(obs, **rewards)
        row = flat(obs, "obs")
        found = run({**kept, **{name: np.asarray(one)[None] for name, one in row.items()}})
        parts = flat(action, "action")
        for name, part in parts.items():
            np.testing.assert_allclose(found[name][0], part, rtol=1e-4, atol=1e-4)
        obs, reward, _, _, _ = env.step(action)
        following = {
            name.removeprefix("next_"): column
            for name, column in found.items()
            if name not in parts
        }
        kept |= following
        if "is_first" in kept:
            kept["is_first"] = np.zeros(1, bool)
        if "prev_reward" in kept:
            kept["prev_reward"] = np.float32([reward])
        if "prev_action" in kept:
            kept["prev_action"] = found["action"]


IN_MAKE_TEST = (DQNPolicy, RecurrentPPOPolicy)


@pytest.fixture(
    params=[
        pytest.param(cls, marks=() if cls in IN_MAKE_TEST else pytest.mark.slow, id=cls.__name__)
        for cls in EVERY
        if cls is not BCQPolicy  # draws its actions
    ]
)
def every(request: pytest.FixtureRequest) -> Any:
    return request.param


WITHOUT_PACKAGE = """
import sys
sys.modules["dmiddleware"] = None
import numpy as np, torch
inputs = torch.load(sys.argv[2])
print(torch.export.load(sys.argv[1]).module()(**inputs)["action"].tolist())
"""


@pytest.mark.process
@pytest.mark.parametrize("cls", mostly_slow([DQNPolicy, SACPolicy, RecurrentPPOPolicy], keep=1))
def test_torch_loads_the_file_without_this_package(cls: Any, tmp_path: Path) -> None:
    policy = policy_of(cls)
    path = saved(policy, tmp_path / "p.safetensors")
    exported = export_policy(path, tmp_path / "p.pt2", format="torch")
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    inputs = {
        one.name: torch.zeros(5, *one.shape, dtype=getattr(torch, one.dtype))
        for one in exported.inputs
    }
    inputs["obs"] = obs
    if "is_first" in inputs:
        inputs["is_first"][:] = True
    torch.save(inputs, tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_PACKAGE, exported.path, "inputs.pt"],
        capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        json.loads(done.stdout), ActingPolicy(policy)(obs.numpy()), rtol=1e-4, atol=1e-4
    )


class Mixed(gym.Env[Any, Any]):
    """Nested observations with an image, and a nested action."""

    observation_space = gym.spaces.Dict(
        {"image": gym.spaces.Box(0, 255, (3, 36, 36), np.uint8), "place": gym.spaces.Discrete(4)}
    )
    action_space = gym.spaces.Dict(
        {"move": gym.spaces.Discrete(2, start=3), "aim": gym.spaces.Box(-3.0, 2.0, (2, 1))}
    )


@pytest.mark.slow
def test_nested_spaces_have_dotted_names(tmp_path: Path) -> None:
    policy = PPOPolicy.for_env(Mixed(), seed=0)
    path = saved(policy, tmp_path / "p.safetensors")
    exported = export_policy(path, tmp_path / "p.onnx")
    assert [one.name for one in exported.inputs] == ["obs.image", "obs.place"]
    assert [one.dtype for one in exported.inputs] == ["uint8", "int64"]
    obs = Mixed.observation_space.sample()
    found = Onnx(exported.path)({f"obs.{k}": np.asarray(v)[None] for k, v in obs.items()})
    action = ActingPolicy(policy)(obs)
    assert found["action.move"][0] == action["move"] and action["move"] >= 3
    np.testing.assert_allclose(found["action.aim"][0], action["aim"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", mostly_slow([SACPolicy, DQNPolicy, RecurrentPPOPolicy], keep=1))
def test_a_file_of_a_policy_in_bfloat16_computes_in_float32(cls: Any, tmp_path: Path) -> None:
    path = saved(made(cls, autocast="bfloat16"), tmp_path / "p.safetensors")
    exact = made(cls)  # with the same weights
    exported = export_policy(path, tmp_path / "p.onnx")
    ports = {
        port.name: np.zeros((1, *port.shape), port.dtype)
        for port in exported.inputs
        if port.name != "obs"
    }
    if "is_first" in ports:
        ports["is_first"][:] = True
    for obs in np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32):
        action = Onnx(exported.path)({**ports, "obs": obs[None]})["action"][0]
        np.testing.assert_allclose(action, ActingPolicy(exact)(obs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy, RecurrentPPOPolicy])
def test_a_file_takes_what_the_actor_sees_alone(cls: Any, tmp_path: Path) -> None:
    policy = cls.for_env(Parts(), seed=0, obs_groups=GROUPS, obs_norm=True)
    exported = export_policy(saved(policy, tmp_path / "p.safetensors"), tmp_path / "p.onnx")
    assert [port.name for port in exported.inputs if "obs" in port.name] == ["obs.proprio"]
    card = write_model_card(exported, None).read_text()
    assert "obs.proprio" in card
    assert "obs.mass" not in card
    assert "- mass" in card  # among the settings


def test_a_mask_forbids_actions(tmp_path: Path) -> None:
    policy = made(DQNPolicy)
    path = saved(policy, tmp_path / "p.safetensors")
    run = Onnx(export_policy(path, tmp_path / "p.onnx", action_mask=True).path)
    obs = np.eye(3, dtype=np.float32)
    for choice in range(3):
        mask = np.zeros((3, 3), bool)
        mask[:, choice] = True
        assert run({"obs": obs, "action_mask": mask})["action"].tolist() == [choice] * 3
    path = saved(made(SACPolicy), tmp_path / "p.safetensors")
    with pytest.raises(ConfigError, match="mask"):
        export_policy(path, tmp_path / "p.onnx", action_mask=True)


@pytest.mark.parametrize("cls", [QMIXPolicy, RecurrentMAPPOPolicy])
def test_a_team_with_masks_can_be_exported(cls: Any, tmp_path: Path) -> None:
    env = CountingTeam(masked=True)
    path = saved(cls.for_env(env, seed=0), tmp_path / "p.safetensors")
    exported = export_policy(path, tmp_path / "p.pt2", format="torch")
    act = torch.export.load(exported.path).module()
    shapes = {port.name: (1, *port.shape) for port in exported.inputs}
    obs, _ = env.reset()
    inputs: dict[str, Any] = {
        "obs": {key: torch.as_tensor(value)[None] for key, value in obs.items()}
    }
    if "is_first" in shapes:
        inputs["state"] = torch.zeros(shapes["state"])
        inputs["is_first"] = torch.ones(1, dtype=torch.bool)
        inputs["prev_action"] = torch.zeros(shapes["prev_action"], dtype=torch.int64)
    assert act(**inputs)["action"].tolist() == [[0, 1, 2]]


def test_a_wrong_suffix_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.pt2"):
        export_policy(tmp_path / "missing", tmp_path / "p.onnx", format="torch")


def test_what_cannot_be_traced_is_refused_in_words(tmp_path: Path) -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, obs: Any) -> Any:
            logit = self.layer(obs)
            return {"logit": logit if logit.sum().item() > 0 else -logit}

    policy = DQNPolicy.for_env(env_for(DQNPolicy), model=Branches(), seed=0)
    path = saved(policy, tmp_path / "p.safetensors")
    with pytest.raises(ConfigError, match="cannot trace DQNPolicy with its network Branches"):
        export_policy(path, tmp_path / "p.onnx", model=Branches())
    assert not list(tmp_path.glob("*p.onnx*"))


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_policy_that_draws_its_best_action_is_refused_in_words(
    format: ExportFormat, tmp_path: Path
) -> None:
    path = saved(policy_of(BCQPolicy), tmp_path / "p.safetensors")
    with pytest.raises(ConfigError, match="BCQPolicy draws random numbers for its best action"):
        export_policy(path, tmp_path / f"p{SUFFIXES[format]}", format=format)
    assert list(tmp_path.iterdir()) == [path]


def a_run(folder: Path) -> Path:
    """Return the folder of a run, as Experiment leaves it."""
    policy = DQNPolicy.for_env(gym.make("CartPole-v1"), seed=0)
    (folder / "ckpt").mkdir(parents=True)
    saved(policy, folder / "ckpt" / "best.safetensors")
    config = {
        "program": "train.main", "arguments": {"seed": 3}, "seed": 3,
        "env": {"id": "CartPole-v1", "env_kwargs": {"max_episode_steps": 20}},
        "policy": {"type": "dqn", "learning_rate": 0.002},
        "versions": {"torch": "2.9"}, "git": {"commit": "0123456789abcdef", "dirty": True},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    result = {"mean_return": 487.3, "last_return": 12.0, "n_episode": 100, "env_step": 50_000,
              "train_iter": 4_000, "train_s": 61.0}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def ran(*words: object) -> Result:
    return CliRunner().invoke(ditask, list(map(str, words)))


def test_a_model_card_says_what_the_policy_is(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    result = ran("export", run, "--format", "torch")
    assert result.exit_code == 0, result.output
    assert (run / "export" / "policy.pt2").is_file()
    text = (run / "export" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    described = yaml.safe_load(head)
    assert described["library_name"] == "dmiddleware" and "CartPole-v1" in described["tags"]
    (entry,) = described["model-index"][0]["results"]
    assert entry["metrics"][0]["value"] == 487.3
    for word in ("487.3", "12.0", "50,000", "learning_rate: 0.002", "0123456789ab", "with changes",
                 "max_episode_steps: 20", "`obs`", torch.__version__, "2.9"):  # fmt: skip
        assert word in body, word
    assert ran("export", run, "--format", "torch").exit_code == 0  # it may be written again


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ('{"mean_return": 487.3, "env_step": "many", "train_s": null}', "487.3"),
        ('{"mean_return": "high", "env_step": 5}', "no final evaluation"),
        ('{"mean_return": 487.3, "last_', "no final evaluation"),
        ("[487.3]", "no final evaluation"),
        ("", "no final evaluation"),
    ],
)
def test_a_model_card_has_what_is_whole_of_a_damaged_result(
    result: str, shown: str, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run")
    (run / "result.json").write_text(result)
    exported = ran("export", run, "--format", "torch")
    assert exported.exit_code == 0, exported.output
    card = (run / "export" / "README.md").read_text()
    assert shown in card and "many" not in card


def test_a_readme_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "README.md").write_text("my project")
    result = ran("export", run, "--output", tmp_path / "policy.onnx")
    assert result.exit_code == 1 and "README.md" in result.output
    assert (tmp_path / "README.md").read_text() == "my project"
    assert not (tmp_path / "policy.onnx").exists()


def test_the_code_in_a_card_runs(tmp_path: Path) -> None:
    exported = ran("export", a_run(tmp_path / "run"), "--output", tmp_path / "out" / "policy.onnx")
    assert exported.exit_code == 0, exported.output
    code = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"obs": np.zeros((2, 4), np.float32)}
    before = Path.cwd()
    os.chdir(tmp_path / "out")
    try:
        exec(code, names)
    finally:
        os.chdir(before)
    assert names["action"].shape == (2,)


class Spaces(gym.Env[Any, Any]):
    """An env that has only spaces."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space


DEEP = gym.spaces.Dict(
    {
        "move it": gym.spaces.Discrete(2),
        "arm": gym.spaces.Dict(
            {"aim": gym.spaces.Box(-1, 1, (2,)), "grip": gym.spaces.Discrete(3)}
        ),
        "pair": gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,)))),
    }
)


def rows_of(space: Any) -> Any:
    """Return the shapes of a batch of 2 actions, nested as the space."""
    if isinstance(space, gym.spaces.Dict):
        return {name: rows_of(one) for name, one in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(map(rows_of, space))
    return (2, *space.shape)


def shapes_of(action: Any) -> Any:
    """Return the shapes of nested arrays."""
    if isinstance(action, dict):
        return {name: shapes_of(one) for name, one in action.items()}
    if isinstance(action, tuple):
        return tuple(map(shapes_of, action))
    return action.shape


@pytest.mark.parametrize("action_space", [DEEP["arm"], pytest.param(DEEP, marks=pytest.mark.slow)])
def test_the_code_in_a_card_puts_the_parts_of_an_action_together(
    action_space: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gym.spaces.Dict({"near-by": gym.spaces.Box(-1, 1, (3,)), "x": gym.spaces.Discrete(2)})
    policy = PPOPolicy.for_env(Spaces(seen, action_space), seed=0)
    monkeypatch.chdir(tmp_path)
    exported = export_policy(saved(policy, tmp_path / "p.safetensors"), tmp_path / "p.onnx")
    code = write_model_card(exported, None).read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {
        "obs_near_by": np.zeros((2, 3), np.float32),
        "obs_x": np.zeros(2, np.int64),
    }
    exec(code, names)
    assert shapes_of(names["action"]) == rows_of(action_space)


VAST = [
    gym.spaces.Box(-1e300, 1e300, (3,), np.float64),
    gym.spaces.Box(1e39, 1e300, (3,), np.float64),
    gym.spaces.Dict({"a": gym.spaces.Box(0, 1e308, (2,), np.float64), "b": gym.spaces.Discrete(2)}),
    gym.spaces.Box(-3e38, 3e38, (3,), np.float32),
    gym.spaces.Box(-np.inf, np.inf, (3,), np.float64),
]


@pytest.mark.parametrize("space", mostly_slow(VAST, keep=[0, 2]))
def test_observations_beyond_float32_are_exported(space: Any, tmp_path: Path) -> None:
    policy = PPOPolicy.for_env(Spaces(space, gym.spaces.Box(-1, 1, (2,))), seed=0)
    path = saved(policy, tmp_path / "p.safetensors")
    exported = export_policy(path, tmp_path / "p.pt2", format="torch")
    assert exported.path.is_file()


@pytest.mark.parametrize(("film", "begin"), [("one.gif", b"GIF"), ("one.mp4", b"\0\0\0")])
def test_play_shows_the_returns_and_writes_a_video(film: str, begin: bytes, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    result = ran("play", run, "--episodes", 3, "--seed", 1, "--video", tmp_path / film)
    assert result.exit_code == 0, result.output
    assert "over 3 episodes of CartPole-v1" in result.output
    assert (tmp_path / film).read_bytes()[:3] == begin
    assert (tmp_path / film).stat().st_size > 500
    again = ran("play", run / "ckpt" / "best.safetensors", "--episodes", 3, "--seed", 1)
    assert again.output.splitlines()[0] == result.output.splitlines()[0]


@pytest.mark.parametrize(
    ("film", "message"),
    [("film", "must end in"), ("film.txt", "must end in"), ("nowhere/film.gif", "does not exist")],
)
def test_a_video_that_cannot_be_written_is_refused_before_playing(
    film: str, message: str, tmp_path: Path
) -> None:
    result = ran("play", a_run(tmp_path / "run"), "--video", tmp_path / film)
    assert result.exit_code == 1 and message in result.output
    assert "mean return" not in result.output


OWN = """
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import BCPolicy, BCSettings

class Own(BCPolicy):
    pass

def make_policy(policy: BCSettings = BCSettings(), seed: int = 0) -> Own:
    return Own.for_env(make_env_manager(EnvSettings("CartPole-v1", env_num=1)), policy, seed=seed)
"""


def test_a_policy_of_ones_own_is_built_by_a_function_that_one_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_program.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("own_program")
    small = BCSettings(model={"encoder_hidden_sizes": [8]})
    ckpt = tmp_path / "run" / "ckpt" / "best.safetensors"
    ckpt.parent.mkdir(parents=True)
    policy = own.make_policy(small)
    save_checkpoint(ckpt, policy.eval_mode.state_dict())
    named = (ckpt, "--policy", "own_program:make_policy", "--env", "CartPole-v1", "--episodes", 2)
    other = ran("play", *named)
    assert other.exit_code == 1 and "belongs to another model" in other.output
    arguments = "arguments: {policy: {model: {encoder_hidden_sizes: [8]}}, seed: 3, limit: 9}"
    (tmp_path / "run" / "config.yaml").write_text(arguments)
    result = ran("play", *named)
    assert result.exit_code == 0, result.output
    assert "over 2 episodes of CartPole-v1" in result.output
    loaded = load_policy(ckpt, policy=own.make_policy(small, seed=7))
    obs = np.zeros((3, 4), np.float32)
    assert np.array_equal(loaded(obs), ActingPolicy(policy)(obs))
    target = ("--format", "torch", "--output", tmp_path / "out" / "own.pt2")
    exported = ran("export", ckpt, "--policy", "own_program:make_policy", *target)
    assert exported.exit_code == 0, exported.output
    acting = torch.export.load(tmp_path / "out" / "own.pt2").module()
    assert np.array_equal(acting(obs=torch.from_numpy(obs))["action"], loaded(obs))
    assert ran("export", ckpt, "--policy", "own_program:nothing", *target).exit_code == 1
    for name in ("own_program:nothing", "nowhere:make", "own_program"):
        wrong = ran("play", ckpt, "--env", "CartPole-v1", "--policy", name)
        assert wrong.exit_code == 1 and "module:function" in wrong.output


@pytest.mark.parametrize("env", ["{}", "{id: program.main.<locals>.<lambda>}"])
def test_a_run_whose_env_has_no_id_is_played_in_one_that_is_named(env: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "config.yaml").write_text(f"env: {env}\n")
    result = ran("play", run)
    assert result.exit_code == 1 and "name one with --env" in result.output
    assert ran("play", run, "--env", "CartPole-v1", "--episodes", 1).exit_code == 0


def test_a_policy_of_a_team_is_not_played_without_players_of_the_others(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    wrapper = "dmiddleware.env:GameEnv(teams={'a': 'red_*', 'b': 'blue_*'})"
    game = ("--env", "dmiddleware.zoo.tag:Tag", "--wrapper", wrapper)
    result = ran("play", run, *game, "--episodes", 1)
    assert result.exit_code == 1, result.output
    assert "game of teams" in result.output and "against(make_game" in result.output
