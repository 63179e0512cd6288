"""Import and export of Minari datasets."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import (
    OfflineDataset,
    TensorBuffer,
    as_tree,
    index_rows,
    leaves,
    load_minari,
    save_dataset,
    save_minari,
)
from dmiddleware.errors import ConfigError, DatasetError, StructureError
from tests.dmiddleware.env.optional import needed

minari = needed("minari")

SPACES = {
    "box": gym.spaces.Box(-10.0, 10.0, (2,), np.float32),
    "image": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8),
    "discrete": gym.spaces.Discrete(50),
    "dict": gym.spaces.Dict(
        {
            "a": gym.spaces.Box(-10.0, 10.0, (1,), np.float32),
            "b": gym.spaces.Dict({"c": gym.spaces.Discrete(50)}),
        }
    ),
    "tuple": gym.spaces.Tuple(
        (gym.spaces.Discrete(50), gym.spaces.Box(-10.0, 10.0, (2, 2), np.float32))
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


def values(space, numbers):
    """Return ``[N, …]`` values of a space that differ from number to number."""
    match space:
        case gym.spaces.Discrete():
            return numbers
        case gym.spaces.Box():
            column = numbers.view(-1, *(1,) * len(space.shape)).expand(-1, *space.shape).clone()
            if space.dtype == np.uint8:  # a pattern that a lossy format would change
                column[:, ::2, 1::3] += 100
            return torch.as_tensor(column.numpy().astype(space.dtype))
        case gym.spaces.Dict():
            return {key: values(inner, numbers) for key, inner in space.spaces.items()}
    return {str(place): values(inner, numbers) for place, inner in enumerate(space.spaces)}


def made_rows(observation="box", action="box"):
    """Return seven rows of three episodes: terminated, truncated, and not ended."""
    last_of = torch.tensor([False, False, True, False, True, False, False])
    number = torch.arange(7)
    episode = torch.tensor([4, 4, 4, 5, 5, 9, 9])
    obs_number = number + episode  # an observation more in each episode
    return as_tree(
        {
            "obs": values(SPACES[observation], obs_number),
            "next_obs": values(SPACES[observation], obs_number + 1),
            "action": values(SPACES[action], number),
            "reward": number.float() / 8,
            "done": last_of,
            "terminated": last_of & (number == 2),
            "truncated": last_of & (number == 4),
            "episode_id": episode,
        }
    )


def save(rows, name="made/rows-v0", observation="box", action="box", **options):
    spaces = {"observation_space": SPACES[observation], "action_space": SPACES[action]}
    return save_minari(rows, name, **spaces, **options)


def assert_same(found, wanted, columns):
    ours, theirs = (
        dict(leaves(as_tree({name: rows[name] for name in columns}))) for rows in (found, wanted)
    )
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        assert ours[path].dtype == leaf.dtype, path
        assert torch.equal(ours[path], leaf), path


@pytest.mark.parametrize("observation", SPACES)
@pytest.mark.parametrize("action", ["box", "discrete", "tuple"])
def test_rows_come_back_as_they_were(observation, action):
    rows = made_rows(observation, action)
    save(rows, observation=observation, action=action)
    found = load_minari("made/rows-v0")
    assert_same(found, rows, ["obs", "next_obs", "action", "reward", "terminated"])
    assert found["episode_id"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    # The data of the last episode ends before the episode does.
    assert found["truncated"].tolist() == [False] * 4 + [True, False, True]
    assert torch.equal(found["done"], found["terminated"] | found["truncated"])


def test_others_read_what_we_write():
    path = save(made_rows(), algorithm="SAC", description="a test")
    dataset = minari.load_dataset("made/rows-v0")
    assert path == dataset.storage.data_path
    first, second, third = dataset.iterate_episodes()
    assert first.observations[:, 0].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert first.terminations.tolist() == [False, False, True]
    assert second.truncations.tolist() == [False, True]
    assert third.truncations.tolist() == [False, True]
    metadata = dataset.storage.metadata
    assert (metadata["algorithm_name"], metadata["description"]) == ("SAC", "a test")


def test_a_dataset_of_others_is_read_with_its_true_successors():
    episodes = [
        minari.data_collector.EpisodeBuffer(
            observations=np.arange(first, first + n + 1, dtype=np.float64)[:, None],
            actions=np.arange(n),
            rewards=np.ones(n),
            terminations=(np.arange(n) == n - 1) & (first == 0),
            truncations=np.zeros(n, bool),
        )
        for first, n in ((0, 2), (10, 3))
    ]
    minari.create_dataset_from_buffers(
        "other/data-v0",
        episodes,
        observation_space=gym.spaces.Box(-99, 99, (1,), np.float64),
        action_space=gym.spaces.Discrete(9),
        eval_env="CartPole-v1",
        algorithm_name="none",
        author="nobody",
        author_email="none",
        code_permalink="none",
        description="none",
        env="CartPole-v1",
    )
    rows = load_minari("other/data-v0")
    assert rows["obs"][:, 0].tolist() == [0, 1, 10, 11, 12]
    assert rows["next_obs"][:, 0].tolist() == [1, 2, 11, 12, 13]
    assert rows["terminated"].tolist() == [False, True, False, False, False]
    # Nothing says how the second episode ended.
    assert rows["truncated"].tolist() == [False, False, False, False, True]
    assert rows["obs"].dtype is rows["reward"].dtype is torch.float32


def test_a_folder_is_read_wherever_it_is(folder, monkeypatch):
    data = save(made_rows())
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "elsewhere"))
    for path in (data, str(data), data.parent):
        assert len(load_minari(path)["done"]) == 7


def test_rows_in_lanes_and_in_several_batches_are_joined():
    rows = made_rows()
    lanes = as_tree(
        {name: torch.stack([column[:2], column[5:7]], 1) for name, column in rows.items()}
    )
    save([lanes, index_rows(rows, slice(2, 5))])
    found = load_minari("made/rows-v0")
    assert_same(found, rows, ["obs", "next_obs", "action", "reward", "terminated"])


def test_imported_rows_fill_a_buffer_and_a_file(tmp_path):
    save(made_rows("dict"), observation="dict")
    rows = load_minari("made/rows-v0")
    buffer = TensorBuffer(10, n_step=3, discount=1.0, store_next_obs=False, seed=0)
    buffer.push(rows)
    drawn = buffer.sample(7)
    rows_drawn = dict(zip(drawn["index"].tolist(), drawn["reward"].tolist(), strict=True))
    wanted = {0: 3 / 8, 1: 3 / 8, 2: 2 / 8, 3: 7 / 8, 4: 4 / 8, 5: 11 / 8, 6: 6 / 8}
    assert rows_drawn == pytest.approx({index: wanted[index] for index in rows_drawn})
    save_dataset(tmp_path / "rows.safetensors", rows)
    with OfflineDataset(tmp_path / "rows.safetensors") as dataset:
        assert_same(dataset.rows(slice(None)), rows, list(rows))


def test_a_missing_dataset_names_those_that_are_here():
    save(made_rows())
    with pytest.raises(DatasetError, match="made/rows-v0"):
        load_minari("made/row-v0")
    with pytest.raises(DatasetError, match="nothing/here-v0"):
        load_minari("nothing/here-v0")


def test_a_folder_without_a_dataset_is_rejected(tmp_path):
    with pytest.raises(DatasetError, match="not a usable Minari dataset"):
        load_minari(tmp_path)


def test_an_episode_that_continues_after_its_end_is_rejected():
    class Episode:
        observations, actions, rewards = np.zeros((4, 1)), np.zeros(3), np.zeros(3)
        terminations, truncations = np.array([False, True, False]), np.zeros(3, bool)

    write(Episode)
    with pytest.raises(DatasetError, match=r"episode 0 .* continues after step 1"):
        load_minari("bad/data-v0")


def test_an_episode_whose_columns_differ_in_length_is_rejected():
    class Episode:
        observations, actions, rewards = np.zeros((3, 1)), np.zeros(3), np.zeros(3)
        terminations = truncations = np.zeros(3, bool)

    write(Episode)
    with pytest.raises(DatasetError, match="does not fit its observations"):
        load_minari("bad/data-v0")


def write(episode):
    """Write one episode as it is, with Minari alone."""
    fields = ("observations", "actions", "rewards", "terminations", "truncations")
    buffer = minari.data_collector.EpisodeBuffer(
        **{name: getattr(episode, name) for name in fields}
    )
    minari.create_dataset_from_buffers(
        "bad/data-v0",
        [buffer],
        env="CartPole-v1",
        eval_env="CartPole-v1",
        observation_space=gym.spaces.Box(-9.0, 9.0, (1,), np.float64),
        action_space=gym.spaces.Discrete(2),
        **dict.fromkeys(
            ("algorithm_name", "author", "author_email", "code_permalink", "description"), "none"
        ),
    )


def test_rows_that_do_not_follow_each_other_are_rejected():
    rows = made_rows()
    with pytest.raises(StructureError, match="episode 4 continues after row 0"):
        save(index_rows(rows, torch.tensor([0, 2, 3, 4])))


def test_a_missing_column_is_rejected():
    rows = made_rows()
    del rows["episode_id"]
    with pytest.raises(StructureError, match="lack episode_id"):
        save(rows)


def test_an_id_that_exists_is_rejected():
    save(made_rows())
    with pytest.raises(ConfigError, match="already exists"):
        save(made_rows())


def test_the_env_or_its_spaces_are_needed():
    with pytest.raises(ConfigError, match="needs env"):
        save_minari(made_rows(), "made/rows-v0")


def test_the_env_is_stored_with_the_data():
    rows = made_rows()
    for name in ("obs", "next_obs"):
        rows[name] = torch.cat([rows[name], rows[name]], -1)
    rows["action"] = torch.zeros(7, dtype=torch.int64)
    save_minari(rows, "made/rows-v0", env="CartPole-v1")
    assert minari.load_dataset("made/rows-v0").recover_environment().spec.id == "CartPole-v1"


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigError, match=r"dmiddleware\[minari\]"):
        load_minari("made/rows-v0")
