"""Imitation of an expert by configs in the classic shape."""

import copy
from pathlib import Path

import pytest
import torch

from dmiddleware.classic import AdvancedReplayBuffer, create_policy
from dmiddleware.classic.pickled import load_pickle
from dmiddleware.data import save_checkpoint
from dmiddleware.errors import CheckpointMismatch, ConfigError
from dmiddleware.policy import DQNPolicy
from dmiddleware.worker import BaseLearner, compile_config, dqfd_run, gail_run, sqil_run

CREATE = {"env": {"type": "CartPole-v1"}, "policy": {"type": "sql"}}
EXPERT_CREATE = {"env": {"type": "CartPole-v1"}, "policy": {"type": "dqn"}}
GAMMA = 0.5


def config(**policy):
    return {
        "exp_name": "trial",
        "env": {"collector_env_num": 2, "evaluator_env_num": 1, "n_evaluator_episode": 1},
        "policy": {
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [8]},
            "discount_factor": GAMMA,
            "learn": {"update_per_collect": 1, "batch_size": 8},
            "collect": {"n_sample": 16, "model_path": "expert.safetensors"},
            "eval": {"evaluator": {"eval_freq": 1000}},
            **policy,
        },
    }


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def expert():
    """Return the configs of an expert whose checkpoint is in ``expert.safetensors``."""
    main = config()
    state = expert_state(main)
    save_checkpoint("expert.safetensors", state)
    torch.save(state, "expert.pth.tar")
    return main, EXPERT_CREATE


def expert_state(main):
    policy = create_policy(compile_config(main, EXPERT_CREATE, seed=5, save=False).policy)
    return policy.collect_mode.state_dict()


@pytest.fixture
def learned(monkeypatch):
    """Return the lists of samples that a learner has learned from."""
    batches, train = [], BaseLearner.train

    def watched(learner, data, *args, **kwargs):
        batches.append(data)
        return train(learner, data, *args, **kwargs)

    monkeypatch.setattr(BaseLearner, "train", watched)
    return batches


@pytest.mark.parametrize("file", ["expert.safetensors", "expert.pth.tar"])
def test_half_of_what_sqil_learns_from_is_the_experts_with_the_reward_one(file, expert, learned):
    main = config()
    main["policy"]["collect"]["model_path"] = file
    sqil_run(main, CREATE, expert, 0, 3, show_progress=False)
    assert len(learned) == 3
    for batch in learned:
        assert [float(row["reward"]) for row in batch] == [0.0] * 4 + [1.0] * 4


def test_random_steps_of_sqil_have_the_reward_zero_too(expert, learned):
    main = config(random_collect_size=40)
    sqil_run(main, CREATE, expert, 0, 3, show_progress=False)
    assert {float(row["reward"]) for batch in learned for row in batch[:4]} == {0.0}


def test_what_an_expert_shows_is_chosen_by_its_network(expert, learned):
    model = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}, "seed": 0}).model
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.head[-1].bias.data[1] = 1.0
    main, create = copy.deepcopy(expert)
    del main["policy"]["model"]["encoder_hidden_size_list"]
    save_checkpoint("expert.safetensors", {"model": model.state_dict()})
    sqil_run(config(), CREATE, (main, create), 0, 4, expert_model=model, show_progress=False)
    assert {int(row["action"]) for batch in learned for row in batch[4:]} == {1}
    assert {int(row["action"]) for batch in learned for row in batch[:4]} == {0, 1}


def test_rewards_of_an_expert_are_summed_over_the_steps_of_the_one_who_learns(expert, learned):
    sqil_run(config(nstep=3), CREATE, expert, 0, 4, show_progress=False)
    whole = 1 + GAMMA + GAMMA**2
    shown = {round(float(row["reward"]), 4) for batch in learned for row in batch[4:]}
    assert whole in shown and shown <= {1.0, 1 + GAMMA, whole}
    assert {float(row["reward"]) for batch in learned for row in batch[:4]} == {0.0}


def test_both_buffers_of_sqil_get_the_priorities_of_their_rows(expert, monkeypatch):
    updates, update = {}, AdvancedReplayBuffer.update

    def record(buffer, info):
        updates.setdefault(repr(buffer).partition("'")[2].partition("'")[0], []).append(info)
        update(buffer, info)

    monkeypatch.setattr(AdvancedReplayBuffer, "update", record)
    sqil_run(config(priority=True), CREATE, expert, 0, 3, show_progress=False)
    assert {name: len(infos) for name, infos in updates.items()} == {
        "buffer": 3, "expert_buffer": 3,
    }  # fmt: skip
    for infos in updates.values():
        assert all(len(info["replay_unique_id"]) == len(info["priority"]) == 4 for info in infos)


@pytest.mark.parametrize("path", [None, "", "lost.pth.tar"])
def test_an_expert_without_a_checkpoint_is_refused(expert, path):
    main = config()
    main["policy"]["collect"]["model_path"] = path
    with pytest.raises(ConfigError, match=rf"got {path!r}; it is policy\.collect\.model_path"):
        sqil_run(main, CREATE, expert)
    with pytest.raises(ConfigError, match=r"reward_model\.expert_model_path"):
        gail_run(gail_config(expert_model_path=path), EXPERT_CREATE, expert)


def test_a_checkpoint_of_another_network_is_refused(expert):
    main = config(model={"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [9]})
    with pytest.raises(CheckpointMismatch):
        sqil_run(config(), CREATE, (main, EXPERT_CREATE))


def dqfd_config(**learn):
    main = config(nstep=3)
    main["policy"]["learn"] |= {"expert_replay_buffer_size": 20, "per_train_iter_k": 2, **learn}
    main["policy"]["collect"]["pho"] = 0.25
    return main


DQFD = {"env": {"type": "CartPole-v1"}, "policy": {"type": "dqfd"}}


def test_dqfd_learns_from_an_expert_alone_and_then_from_a_share_of_its_rows(expert, learned):
    dqfd_run(dqfd_config(), DQFD, expert, 0, 5, show_progress=False)
    n_shown = [sum(bool(row["is_expert"]) for row in batch) for batch in learned]
    assert n_shown == [8, 8, 2, 2, 2] and all(len(batch) == 8 for batch in learned)
    rows = [row for batch in learned for row in batch]
    assert {float(row["step_reward"]) for row in rows} == {1.0}, "as the env rewards them"
    assert 1 + GAMMA + GAMMA**2 in {round(float(row["reward"]), 4) for row in rows}
    shown = {tuple(row["obs"].tolist()) for row in rows if row["is_expert"]}
    assert len(shown) <= 20, "what the expert has shown at the beginning"


def test_dqfd_sets_the_priorities_of_what_the_expert_has_shown(expert, monkeypatch):
    updates, update = [], AdvancedReplayBuffer.update

    def record(buffer, info):
        updates.append((repr(buffer).partition("(")[2], len(info["priority"])))
        update(buffer, info)

    monkeypatch.setattr(AdvancedReplayBuffer, "update", record)
    main = dqfd_config()
    main["policy"]["priority"] = True
    dqfd_run(main, DQFD, expert, 0, 3, show_progress=False)
    sizes = [(name.partition(",")[0], size) for name, size in updates]
    assert sizes == [
        *[("'expert_buffer'", 8)] * 2, ("'buffer'", 6), ("'expert_buffer'", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("per_train_iter_k", -1), ("expert_replay_buffer_size", 0)]
)
def test_settings_of_dqfd_out_of_their_range_are_refused(expert, name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer"):
        dqfd_run(dqfd_config(**{name: value}), DQFD, expert)


def gail_config(**options):
    main = config()
    main["reward_model"] = {
        "input_size": 5, "hidden_size": 8, "batch_size": 8, "update_per_collect": 2,
        "expert_model_path": "expert.safetensors", "collect_count": 24, **options,
    }  # fmt: skip
    return main


def test_gail_collects_the_experts_play_and_rewards_the_policy_by_it(expert, learned):
    gail_run(gail_config(), EXPERT_CREATE, expert, 0, 3, show_progress=False)
    shown = load_pickle(Path("trial", "expert_data.pkl"))
    assert len(shown) == 24 and shown[0]["obs"].shape == (4,)
    rewards = {float(row["reward"]) for batch in learned for row in batch}
    assert len(rewards) > 8 and all(0 < reward < 5 and reward != 1 for reward in rewards)


def test_gail_reads_the_experts_play_from_a_file(expert, learned):
    gail_run(gail_config(data_path="shown"), EXPERT_CREATE, expert, 0, 1, show_progress=False)
    Path("expert.safetensors").unlink()
    gail_run(gail_config(data_path="shown"), EXPERT_CREATE, None, 0, 1, show_progress=False)
    assert len(learned) == 2
    with pytest.raises(FileNotFoundError):
        gail_run(gail_config(data_path="elsewhere"), EXPERT_CREATE, None, show_progress=False)


def test_gail_waits_for_as_many_new_rows_as_it_declares(expert, monkeypatch):
    from dmiddleware.classic.reward_models import GailRewardModel

    sizes, train = [], GailRewardModel.train

    def watched(model, data=None):
        sizes.append(len(model.train_data))
        train(model, data)

    monkeypatch.setattr(GailRewardModel, "train", watched)
    gail_run(gail_config(), EXPERT_CREATE, expert, 0, 2, show_progress=False)
    gail_run(
        gail_config(target_new_data_count=20), EXPERT_CREATE, expert, 0, 2, show_progress=False
    )
    assert sizes == [64, 64, 32, 32], "collected in portions of 16, and forgotten after each"


def test_gail_with_sums_of_several_rewards_is_refused(expert):
    main = gail_config()
    main["policy"]["nstep"] = 3
    with pytest.raises(ConfigError, match="set nstep to 1"):
        gail_run(main, EXPERT_CREATE, expert)


@pytest.mark.parametrize("name", ["ppo", "r2d2"])
def test_an_algorithm_without_a_replay_of_rows_does_not_imitate(expert, name):
    create = {**CREATE, "policy": {"type": name}}
    main = config()
    if name == "ppo":
        del main["policy"]["learn"]["update_per_collect"]
    with pytest.raises(ConfigError, match="use an off-policy algorithm"):
        sqil_run(main, create, expert)


def test_gail_without_a_number_of_rows_to_collect_is_refused(expert):
    main = gail_config(collect_count=None)
    with pytest.raises(ConfigError, match="collect_count"):
        gail_run(main, EXPERT_CREATE, expert)
