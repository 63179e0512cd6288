"""Recorded data of others: names, files, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import as_tree, load_rows, save_dataset
from dmiddleware.errors import DatasetError, StructureError
from dmiddleware.policy import ActionCodec, BCPolicy

N_ROWS = 6


def written(path: Path, **columns: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = column
    return path


def d4rl(**more: Any) -> dict[str, Any]:
    """Return two episodes: one that ends itself, and one that a time limit cuts."""
    at = np.arange(N_ROWS, dtype=np.float64)
    return {
        "observations": np.stack([at, 10 * at], 1), "actions": at[:, None] / 10, "rewards": at,
        "terminals": np.array([0, 0, 1, 0, 0, 0], np.uint8),
        "timeouts": np.array([0, 0, 0, 0, 0, 1], np.float32),
        **more,
    }  # fmt: skip


def ours(**more: Any) -> dict[str, Any]:
    no = np.zeros(N_ROWS, bool)
    obs = np.zeros((N_ROWS, 2), np.float32)
    columns = {
        "obs": obs, "next_obs": obs, "action": np.zeros((N_ROWS, 1), np.float32),
        "reward": np.zeros(N_ROWS, np.float32), "done": no, "terminated": no, **more,
    }  # fmt: skip
    return {name: column for name, column in columns.items() if column is not None}


def test_names_of_d4rl_become_ours(tmp_path: Path) -> None:
    rows = load_rows(written(tmp_path / "a.hdf5", **d4rl()))
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 3, 4]  # the cut row has no next observation
    assert rows["next_obs"][:, 0].tolist() == [1, 2, 2, 4, 5]
    assert rows["terminated"].tolist() == [False, False, True, False, False]
    assert rows["truncated"].tolist() == [False, False, False, False, True]
    assert rows["done"].tolist() == [False, False, True, False, True]
    assert rows["episode_id"].tolist() == [0, 0, 0, 1, 1]
    assert all(rows[name].dtype == torch.float32 for name in ("obs", "action", "reward"))


def test_next_observations_of_d4rl_keep_every_row(tmp_path: Path) -> None:
    following = np.arange(N_ROWS)[:, None] + np.ones((1, 2))
    columns = d4rl(next_observations=following, rewards=np.ones((N_ROWS, 1)))
    rows = load_rows(written(tmp_path / "a.h5", **columns))
    assert len(rows["done"]) == N_ROWS and rows["next_obs"][-1, 0] == 6
    assert rows["reward"].shape == (N_ROWS,)
    assert rows["truncated"].tolist()[-1] and rows["done"].tolist()[-1]


@pytest.mark.parametrize(
    ("timeouts", "kept"),
    [
        ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4]),  # the data ends in the middle of an episode
        ([1, 0, 0, 0, 0, 1], [1, 2, 3, 4]),  # an episode of one row
        ([0, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4]),  # both flags in one row
        ([0, 0, 0, 1, 1, 1], [0, 1, 2]),
    ],
)
def test_every_row_but_those_that_are_cut_is_kept(
    timeouts: list[int], kept: list[int], tmp_path: Path
) -> None:
    rows = load_rows(written(tmp_path / "a.hdf5", **d4rl(timeouts=np.array(timeouts))))
    assert rows["obs"][:, 0].tolist() == kept
    assert bool(rows["done"][-1])
    follows = ~rows["done"][:-1]
    assert torch.equal(rows["next_obs"][:-1][follows], rows["obs"][1:][follows])


def test_missing_timeouts_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = d4rl()
    del columns["timeouts"]
    load_rows(written(tmp_path / "a.hdf5", **columns))
    assert "a.hdf5 has no timeouts" in caplog.text


@pytest.mark.parametrize("form", ["hdf5", "safetensors"])
@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (ours(obs=None), "lacks obs; it has action [6, 1], done [6]"),
        (ours(action=None, done=None, terminated=None), "lacks action, done; it has next_obs"),
        ({"state": np.zeros((3, 2)), "act": np.zeros(3)}, "lacks obs, action, done; it has act"),
        ({k: v for k, v in d4rl().items() if k != "terminals"}, "wanted are obs, action, reward"),
    ],
)
def test_other_columns_are_refused_with_those_that_are_wanted(
    columns: dict[str, Any], problem: str, form: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{form}"
    if form == "hdf5":
        written(path, **columns)
    else:
        save_dataset(path, as_tree(columns))
    with pytest.raises(DatasetError) as error:
        load_rows(path)
    assert problem in str(error.value) and str(path) in str(error.value)
    assert "observations, actions, rewards, terminals" in str(error.value)


def test_groups_and_texts_are_no_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["data/demo_0/obs"] = np.zeros(3)
        file["env"] = ["maze"]
    with pytest.raises(DatasetError, match="no columns of numbers, but the groups data"):
        load_rows(tmp_path / "a.hdf5")


@pytest.mark.parametrize("name", ["rows.npz", "rows.csv", "rows"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"1")
    with pytest.raises(DatasetError, match=r"must end in \.hdf5, \.h5 or \.safetensors"):
        load_rows(tmp_path / name)


@pytest.mark.parametrize("form", ["hdf5", "safetensors"])
def test_done_without_terminated_is_stated(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = np.array([0, 1, 0, 0, 1, 0], bool)
    columns = ours(done=done, terminated=None)
    path = tmp_path / f"a.{form}"
    if form == "hdf5":
        written(path, **columns)
    else:
        save_dataset(path, as_tree(columns))
    with caplog.at_level(logging.WARNING):
        rows = load_rows(path)
    assert rows["terminated"].tolist() == done.tolist()
    assert "no terminated, so each end of an episode counts as a termination" in caplog.text


def test_done_follows_from_the_other_flags(tmp_path: Path) -> None:
    columns = ours(
        done=None,
        terminated=np.array([0, 1, 0, 0, 0, 0], bool),
        truncated=np.array([0, 0, 0, 1, 0, 0], bool),
    )
    rows = load_rows(written(tmp_path / "a.hdf5", **columns))
    assert rows["done"].tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("space", "action", "problem"),
    [
        (spaces.Box(-1, 1, (1,)), torch.zeros(8, 2), r"\(8, 2\), but must be \(8, 1\)"),
        (spaces.Box(-1, 1, (3,)), torch.zeros(8, 1), r"\(8, 1\), but must be \(8, 3\)"),
        (spaces.Box(-1, 1, (1,)), torch.zeros(8), r"\(8,\), but must be \(8, 1\)"),
        (spaces.Box(-1, 1, (8,)), torch.zeros(8), r"\(8,\), but must be \(8, 8\)"),
        (spaces.Box(-1, 1, (2, 2)), torch.zeros(8, 4), r"\(8, 4\), but must be \(8, 2, 2\)"),
        (spaces.MultiDiscrete([2, 3]), torch.zeros(8, 3, dtype=torch.int64), r"be \(8, 2\)"),
        (spaces.MultiBinary(4), torch.zeros(8, 1, dtype=torch.int64), r"be \(8, 4\)"),
        (
            spaces.Dict({"aim": spaces.Box(-1, 1, (2,)), "fire": spaces.Discrete(2)}),
            {"aim": torch.zeros(8, 3), "fire": torch.zeros(8, dtype=torch.int64)},
            r"the part 'aim' of the action has shape \(8, 3\)",
        ),
        (
            spaces.Dict({"aim": spaces.Box(-1, 1, (2,)), "fire": spaces.Discrete(2)}),
            {"aim": torch.zeros(8, 2)},
            "the part 'fire' of the action is missing",
        ),
        (
            spaces.Dict({"aim": spaces.Box(-1, 1, (2,))}),
            torch.zeros(8, 2),
            "the part 'aim' of the action is missing",
        ),
    ],
)
def test_actions_of_another_width_are_refused(space: Any, action: Any, problem: str) -> None:
    codec = ActionCodec.for_space(space)
    with pytest.raises(StructureError, match=problem):
        codec.check(as_tree(action) if isinstance(action, dict) else action)


@pytest.mark.parametrize("lead", [(8,), (4, 2)])
def test_actions_of_the_space_pass(lead: tuple[int, ...]) -> None:
    for space, shape in (
        (spaces.Box(-1, 1, (3,)), (3,)),
        (spaces.Box(-1, 1, (2, 2)), (2, 2)),
        (spaces.Discrete(3), ()),
    ):
        dtype = torch.int64 if isinstance(space, spaces.Discrete) else torch.float32
        ActionCodec.for_space(space).check(torch.zeros(*lead, *shape, dtype=dtype))


class Camera(gym.Env[Any, Any]):
    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 1, (2, 3)), "state.arm": spaces.Box(-1, 1, (4,))}
    )
    action_space = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("obs", "problem"),
    [
        (
            {"image": torch.zeros(8, 3, 2), "state.arm": torch.zeros(8, 4)},
            r"obs\.image has shape \(8, 3, 2\), but must be \(8, 2, 3\)",
        ),
        ({"image": torch.zeros(8, 2, 3)}, r"obs has 'image', but must have 'image', 'state\.arm'"),
    ],
)
def test_recorded_observations_of_another_env_are_refused(
    obs: dict[str, torch.Tensor], problem: str
) -> None:
    policy = BCPolicy.for_env(Camera(), batch_size=8)
    rows = as_tree({"obs": obs, "action": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(StructureError, match=problem):
        policy.observe(rows["obs"])
    with pytest.raises(StructureError, match=problem):
        policy.learn_mode.forward(rows)
