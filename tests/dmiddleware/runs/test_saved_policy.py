"""A saved policy acts without the program, the env and the config, and its file runs no code."""

from __future__ import annotations

import contextlib
import copy
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware import Task, load_policy
from dmiddleware.data import TensorBuffer, load_checkpoint, save_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigError,
    DMiddlewareError,
    RunFolderError,
)
from dmiddleware.policy import (
    POLICY_REGISTRY,
    DQNPolicy,
    Policy,
    PPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
)
from dmiddleware.policy.policy_description import describe_policy
from dmiddleware.rollout import ActingPolicy
from middleware import (
    CkptSaver,
    OffPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
)
from tests.dmiddleware.policy.every_policy import EVERY, collected, env_for, made


def saved(policy: Any, path: Path) -> Path:
    """Write the checkpoint that CkptSaver writes of a policy."""
    mode = policy.learn_mode
    save_checkpoint(path, {**mode.state_dict(), "policy": describe_policy(mode.spec)})
    return path


def played(act: ActingPolicy, env: gym.Env[Any, Any], n_step: int = 8) -> list[Any]:
    """Return the actions of a policy in the steps of an env."""
    obs, _ = env.reset(seed=3)
    reward, actions = 0.0, []
    for _ in range(n_step):
        given = {"prev_reward": reward} if "prev_reward" in act.policy.act_inputs else {}
        action = act(obs, **given)
        # A hybrid action is a dictionary of parts of different sizes.
        parts = dict(enumerate(action)) if isinstance(action, tuple) else {"": action}
        parts = action if isinstance(action, dict) else parts
        actions.append({name: np.asarray(part).tolist() for name, part in parts.items()})
        obs, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            act.reset()
            obs, _ = env.reset()
    return actions


def changed(policy: Any) -> Any:
    """Return a policy whose statistics of observations are not those at the start."""
    if policy.obs_norm.is_on and not policy.obs_norm.of_dataset:
        policy.observe(collected(policy)["obs"])
    return policy


@pytest.mark.parametrize("cls", EVERY)
def test_every_policy_acts_as_it_did_before_it_was_saved(cls: Any, tmp_path: Path) -> None:
    norm = {"obs_norm": True} if hasattr(cls.settings_class(), "obs_norm") else {}
    policy = changed(made(cls, **norm))
    loaded = load_policy(saved(policy, tmp_path / "policy.safetensors"))
    assert type(loaded.policy) is cls
    assert played(loaded, env_for(cls)) == played(ActingPolicy(policy), env_for(cls))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3, start=5),
        gym.spaces.MultiDiscrete([2, 3], start=[1, 4]),
        gym.spaces.MultiBinary(3),
        gym.spaces.Box(np.float32([-1.0, 0.0]), np.float32([5.0, np.inf])),
        gym.spaces.Dict({"move": gym.spaces.Discrete(2), "aim": gym.spaces.Box(-3.0, 2.0, (2, 1))}),
        gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(0.1, 0.3, (1,), np.float64))),
    ],
)
def test_actions_are_those_of_the_space(space: Any, tmp_path: Path) -> None:
    class Env(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict(
            {
                "place": gym.spaces.Discrete(4),
                "image": gym.spaces.Box(0, 255, (3, 36, 36), np.uint8),
            }
        )
        action_space = space

    policy = PPOPolicy.for_env(Env(), seed=0)
    loaded = load_policy(saved(policy, tmp_path / "policy.safetensors"))
    obs = Env.observation_space.sample()
    action = loaded(obs)
    assert space.contains(action)
    assert str(action) == str(ActingPolicy(policy)(obs))
    assert loaded.policy.spaces == (Env.observation_space, space)


def run_of(policy: Any, path: Path, **options: Any) -> RunFolder:
    """Save a policy by a short run."""
    envs = make_env_manager(lambda: env_for(type(policy)), env_num=2, seed=0)
    buffer = TensorBuffer(500, seed=0)
    with RunFolder.create("run", root=path) as run, Task(seed=0) as task:
        if not policy.explores:
            task.use(eps_greedy_handler(policy))
        task.use(StepCollector(policy, envs, n_sample=64)).use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=2))
        task.use(CkptSaver(policy, run))
        snapshots = SnapshotSaver(run)
        task.use(snapshots)
        task.run(max_step=2)
        snapshots.save(task)
    return run


@pytest.mark.parametrize("cls", [DQNPolicy, SACPolicy])
def test_a_run_folder_has_its_best_or_else_its_final_policy(cls: Any, tmp_path: Path) -> None:
    policy = made(cls, batch_size=8)
    run = run_of(policy, tmp_path)
    obs = np.ones((5, 3), np.float32)
    expected = ActingPolicy(policy)(obs).tolist()
    assert load_policy(run.path)(obs).tolist() == expected
    assert load_policy(str(run.ckpt_dir / "final.safetensors"))(obs).tolist() == expected
    other = made(cls, seed=1)
    saved(other, run.best_ckpt)
    assert load_policy(run.path)(obs).tolist() == ActingPolicy(other)(obs).tolist()


def test_no_checkpoint_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunFolderError, match=str(path)):
            load_policy(path)


def test_a_snapshot_and_other_files_are_refused(tmp_path: Path) -> None:
    run = run_of(made(DQNPolicy), tmp_path)
    (snapshot,) = (run.path / "snapshots").glob("step_*")
    with pytest.raises(CheckpointMismatch, match="snapshot"):
        load_policy(snapshot)
    save_checkpoint(tmp_path / "rows.safetensors", [1, 2])
    with pytest.raises(CheckpointMismatch, match="not that of a policy"):
        load_policy(tmp_path / "rows.safetensors")
    save_checkpoint(tmp_path / "plain.safetensors", made(DQNPolicy).eval_mode.state_dict())
    with pytest.raises(CheckpointMismatch, match="does not say"):
        load_policy(tmp_path / "plain.safetensors")


class OwnNetwork(nn.Module):
    """A network that nothing describes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, obs: Any) -> Any:
        return {"logit": self.layer(obs)}


def test_a_network_of_ones_own_is_passed_again(tmp_path: Path) -> None:
    policy = DQNPolicy.for_env(env_for(DQNPolicy), model=OwnNetwork(), seed=0)
    path = saved(policy, tmp_path / "policy.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"OwnNetwork.*model="):
        load_policy(path)
    obs = np.eye(3, dtype=np.float32)
    wanted = policy.eval_mode.forward(torch.from_numpy(obs))["action"].tolist()
    assert load_policy(path, model=OwnNetwork())(obs).tolist() == wanted
    with pytest.raises(CheckpointMismatch, match="leave model out"):
        load_policy(saved(made(DQNPolicy), path), model=OwnNetwork())


class Unregistered(DQNPolicy):
    """An algorithm that its file cannot name."""


def test_an_algorithm_of_ones_own_must_be_registered(tmp_path: Path) -> None:
    policy = Unregistered.for_env(env_for(DQNPolicy), seed=0)
    path = saved(policy, tmp_path / "policy.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"Unregistered.*POLICY_REGISTRY"):
        load_policy(path)


@POLICY_REGISTRY.register("policy_registered_for_loading")
class Registered(DQNPolicy):
    """An algorithm that its file names."""


def test_a_registered_algorithm_of_ones_own_is_loaded(tmp_path: Path) -> None:
    policy = Registered.for_env(env_for(DQNPolicy), seed=0)
    loaded = load_policy(saved(policy, tmp_path / "policy.safetensors"))
    assert type(loaded.policy) is Registered


def test_a_policy_that_met_no_env_is_refused(tmp_path: Path) -> None:
    policy = DQNPolicy({"model": {"obs_shape": 3, "action_shape": 2}})
    with pytest.raises(CheckpointMismatch, match="for_env"):
        load_policy(saved(policy, tmp_path / "policy.safetensors"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_cuda_is_asked_for_explicitly(tmp_path: Path) -> None:
    path = saved(made(DQNPolicy), tmp_path / "policy.safetensors")
    state = load_checkpoint(path)
    state["policy"]["settings"]["cuda"] = True
    save_checkpoint(path, state)
    assert load_policy(path).policy.device == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        load_policy(path, cuda=True)


@pytest.mark.process
def test_a_process_that_knows_nothing_of_the_run_acts(tmp_path: Path) -> None:
    policy = made(RecurrentPPOPolicy)
    saved(policy, tmp_path / "policy.safetensors")
    program = """
import sys
from dmiddleware import load_policy
policy = load_policy("policy.safetensors")
print([int(policy([0.1 * step, -1.0, 0.5], prev_reward=1.0)) for step in range(5)])
assert "middleware" not in sys.modules and "tests" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    act = ActingPolicy(policy)
    wanted = [int(act(np.float32([0.1 * n, -1.0, 0.5]), prev_reward=1.0)) for n in range(5)]
    assert done.stdout.strip() == str(wanted)


FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork",
             "pickle.find_class", "socket.connect", "ctypes.dlopen", "os.remove")  # fmt: skip
events: list[str] = []
is_watched = False


def watch(event: str, args: Any) -> None:
    if is_watched and (event in FORBIDDEN or (event == "import" and "trap" in str(args[0]))):
        events.append(f"{event} {args}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Note what loading a file must not do."""
    global is_watched
    if watch not in hooked:
        hooked.append(watch)
        sys.addaudithook(watch)
    events.clear()
    is_watched = True
    try:
        yield
    finally:
        is_watched = False


hooked: list[Any] = []

VALUES: list[Any] = [
    None, True, -1, 0, 7, 2**31, 2**62, 1e308, float("nan"), "", "trap", "os.system", "trap:run",
    b"\x80\x04cos\nsystem\n.", [], [[]], {}, {"type": "trap"}, ["trap"], {"import_names": ["trap"]},
    [2**40] * 3, {"type": "Box", "low": 0, "high": 1, "shape": [2**20, 2**20], "dtype": "O"},
    {"type": "Dict", "spaces": {"a": {"type": "Discrete", "n": -3, "start": 0}}}, ("a", 1),
    {"kind": "linear", "start": "x"}, np.zeros(3), torch.zeros(2, 2),
]  # fmt: skip


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in a state, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list) and value[key]:
            found += places_in(value[key])
    return found


def mutated(state: Any, draw: random.Random) -> Any:
    """Return a state with some values replaced, left out or added."""
    state = copy.deepcopy(state)
    for _ in range(draw.randint(1, 3)):
        # Half of them in what describes the policy.
        container, key = draw.choice(places_in(state["policy"] if draw.random() < 0.5 else state))
        match draw.randrange(4):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                container[draw.choice(["import_names", "type", "seed", "x"])] = draw.choice(VALUES)
            case _:
                container[key] = copy.deepcopy(draw.choice(VALUES))
        if not isinstance(state.get("policy"), dict) or not state["policy"]:
            break
    return state


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes of a file with some changed, left out or added."""
    content = bytearray(data)
    match draw.randrange(3):
        case 0:
            for _ in range(draw.randint(1, 8)):
                content[draw.randrange(len(content))] = draw.randrange(256)
        case 1:
            del content[draw.randrange(len(content)) :]
        case _:
            at = draw.randrange(len(content))
            content[at:at] = draw.randbytes(draw.randint(1, 40))
    return bytes(content)


def fuzz(n: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load many files of which something is wrong."""
    (folder / "trap.py").write_text("raise SystemExit('the file ran code')")
    monkeypatch.syspath_prepend(str(folder))
    small = {"encoder_hidden_sizes": [8]}
    policies: list[Policy] = [
        made(DQNPolicy, model=small),
        made(SACPolicy, model={"actor_hidden_sizes": [8], "critic_hidden_sizes": [8]}),
        changed(made(PPOPolicy, model=small, obs_norm=True)),
    ]
    files = [saved(one, folder / f"{at}.safetensors") for at, one in enumerate(policies)]
    states, contents = [load_checkpoint(one) for one in files], [one.read_bytes() for one in files]
    draw = random.Random(seed)
    outcomes = {"loaded": 0, "refused": 0}
    path = folder / "fuzzed.safetensors"
    for _ in range(n):
        at = draw.randrange(len(files))
        if draw.random() < 0.3:
            path.write_bytes(damaged(contents[at], draw))
        else:
            save_checkpoint(path, mutated(states[at], draw))
        with watched():
            try:
                load_policy(path)
                outcomes["loaded"] += 1
            except (CheckpointDamaged, CheckpointMismatch):
                outcomes["refused"] += 1
            except DMiddlewareError as error:
                raise AssertionError(f"another error than is documented: {error!r}") from error
        assert not events
    assert "trap" not in sys.modules
    assert outcomes["refused"] > n / 2


def test_fuzzed_files_do_no_more_than_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz(200, 0, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_fuzzed_files_do_no_more_than_raise(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz(1000, seed, tmp_path, monkeypatch)
