import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.classic import reward_models
from dmiddleware.classic.pickled import load_pickle
from dmiddleware.data import load_checkpoint
from dmiddleware.errors import ConfigError, DataError, NotEnoughData

SMALL = {"batch_size": 8, "update_per_collect": 20, "hidden_size_list": [16, 8]}


def transitions(n_rows: int = 40, *, shift: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(3, generator=generator) + shift,
            "next_obs": torch.randn(3, generator=generator) + shift,
            "action": torch.tensor([n % 2]),
            "reward": torch.tensor([2.0]),
        }
        for n in range(n_rows)
    ]


def model(name: str, **changes: Any) -> Any:
    cfg = {"type": name, "obs_shape": 3, "action_shape": 2, **SMALL, **changes}
    return reward_models.create_reward_model(cfg, "cpu", None)


@pytest.mark.parametrize("name", ["rnd", "icm"])
def test_what_was_learned_from_is_rewarded_less_than_what_is_new(name: str) -> None:
    torch.manual_seed(0)
    curiosity = model(name, intrinsic_reward_type="assign", obs_norm=False)
    old, new = transitions(), transitions(shift=3.0, seed=1)
    curiosity.collect_data(old)
    for _ in range(5):
        curiosity.train()
    rewards = [float(row["reward"]) for row in curiosity.estimate(old + new)]
    assert min(rewards) == 0.0 and max(rewards) == pytest.approx(1.0, abs=1e-4)
    assert np.mean(rewards[:40]) < 0.6 * np.mean(rewards[40:])


def test_an_intrinsic_reward_is_added_kept_beside_or_put_instead_of_the_other() -> None:
    rows = transitions()
    options = {"intrinsic_reward_weight": 0.5, "extrinsic_reward_norm_max": 2}
    assigned = model("rnd", intrinsic_reward_type="assign", **options).estimate(rows)
    added = model("rnd", **options).estimate(rows)
    beside = model("rnd", intrinsic_reward_type="new", **options).estimate(rows)
    for row, sum_row, beside_row in zip(assigned, added, beside, strict=True):
        assert float(sum_row["reward"]) == pytest.approx(1.0 + 0.5 * float(row["reward"]))
        assert float(beside_row["reward"]) == 1.0
        assert float(beside_row["intrinsic_reward"]) == pytest.approx(float(row["reward"]))
    assert all(float(row["reward"]) == 2.0 for row in rows), "the buffer's rewards are unchanged"


def test_it_learns_from_what_there_is_and_needs_something() -> None:
    curiosity = model("rnd", intrinsic_reward_type="assign")
    curiosity.collect_data(transitions(3))
    before = curiosity.reward_model.predictor.module[0].state_dict()
    weights = {name: tensor.clone() for name, tensor in before.items()}
    curiosity.train()
    after = curiosity.reward_model.predictor.module[0].state_dict()
    assert any(not torch.equal(after[name], tensor) for name, tensor in weights.items())
    curiosity.clear_data()
    with pytest.raises(NotEnoughData, match="collect_data"):
        curiosity.train()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"intrinsic_reward_type": "times"}, "times"),
        ({"obs_norm_clamp_min": -2}, "obs_norm_clamp_min"),
        ({"intrinsic_reward_weight": None}, "intrinsic_reward_weight"),
    ],
)
def test_settings_that_are_not_here_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        model("rnd", **options)


def test_gail_rewards_what_the_expert_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expert, novice = transitions(shift=2.0), transitions(seed=1)
    (tmp_path / "expert_data.pkl").write_bytes(pickle.dumps(expert))
    gail = model("gail", input_size=4, data_path=str(tmp_path))
    gail.collect_data(novice)
    for _ in range(5):
        gail.train()
    rewards = [float(row["reward"]) for row in gail.estimate(novice + expert)]
    assert np.mean(rewards[:40]) < 0.5 * np.mean(rewards[40:])


def test_a_saved_reward_model_continues(tmp_path: Path) -> None:
    first, second = model("rnd"), model("rnd")
    first.collect_data(transitions())
    first.train()
    first.save(str(tmp_path))
    second.load_state_dict(
        load_checkpoint(tmp_path / "reward_model" / "ckpt" / "ckpt_best.safetensors")
    )
    rows = transitions(seed=2)
    pairs = zip(first.estimate(rows), second.estimate(rows), strict=True)
    assert all(torch.equal(a["reward"], b["reward"]) for a, b in pairs)


@pytest.mark.parametrize(("strategy", "goals"), [("final", {3.0}), ("future", {2.0, 3.0})])
def test_hindsight_gives_goals_that_the_episode_reaches(strategy: str, goals: set[float]) -> None:
    episode = [
        {
            "obs": torch.tensor([float(n), 9.0]),
            "next_obs": torch.tensor([float(n + 1), 9.0]),
            "reward": torch.zeros(1),
            "action": n,
        }
        for n in range(3)
    ]
    her = reward_models.HerRewardModel({"her_strategy": strategy, "her_replay_k": 20})
    episodes = her.estimate(episode)
    assert len(episodes) == 20 and all(len(steps) == 3 for steps in episodes)
    rows = [steps[1] for steps in episodes]
    assert {float(row["obs"][1]) for row in rows} == goals
    assert all(float(row["obs"][0]) == 1.0 and row["action"] == 1 for row in rows)
    assert all(float(row["reward"]) == float(row["next_obs"][0] == row["obs"][1]) for row in rows)


def test_a_pickled_file_that_names_code_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.pkl"
    rows = [{"obs": np.arange(3), "next_obs": torch.ones(2), "done": False, "x": np.float32(1)}]
    file.write_bytes(pickle.dumps(rows))
    (row,) = load_pickle(file)
    assert row["obs"].tolist() == [0, 1, 2] and torch.equal(row["next_obs"], torch.ones(2))
    for content in (pickle.dumps(print), b"\x80", b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"data\.pkl"):
            load_pickle(file)
