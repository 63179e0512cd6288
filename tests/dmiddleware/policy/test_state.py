"""A policy that is saved and loaded continues as if it had never stopped."""

import pytest
import torch

from dmiddleware.errors import CheckpointMismatch
from dmiddleware.files.checkpoint import load_checkpoint, save_checkpoint
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy
from dmiddleware.tree import as_tree, leaves


def same_states(ours, theirs):
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[path]), path
        else:
            assert value == theirs[path], path


class DQN:
    cfg = {"target_update_freq": 4, "grad_clip_norm": 1.0}
    policy = DQNPolicy

    @staticmethod
    def step(policy, seed, transitions, ppo_batch):
        obs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        action = policy.collect_mode.forward(obs, eps=0.5)["action"]
        return policy.learn_mode.forward(transitions(16, seed=seed)), action.tolist()


class SoftDQN(DQN):
    cfg = {"target_update_freq": 1, "target_tau": 0.01, "priority": True}


class PPO:
    falling = {"start": 3e-4, "end": 0.0, "decay": 15, "by": "update"}
    cfg = {
        "obs_norm": True,
        "reward_norm": True,
        "value_norm": True,
        "learning_rate": falling,
    }
    policy = PPOPolicy

    @staticmethod
    def step(policy, seed, transitions, ppo_batch):
        generator = torch.Generator().manual_seed(seed)
        rows = as_tree(
            {
                "reward": torch.randn(5, 2, generator=generator),
                "done": torch.rand(5, 2, generator=generator) < 0.3,
                "episode_id": torch.arange(2).expand(5, 2),
            }
        )
        reward = policy.learn_mode.spec.scale_rewards(rows)
        policy.learn_mode.spec.observe_returns(reward)
        batch = ppo_batch(policy, seed=seed)
        return policy.learn_mode.forward(batch), reward.tolist(), batch["action"].tolist()


class ContinuousPPO(PPO):
    cfg = {
        **PPO.cfg,
        "model": {"action_space": "continuous"},
        "action_low": [-1.0, -1.0],
        "action_high": [1.0, 3.0],
    }


class BC:
    cfg = {}
    policy = BCPolicy

    @staticmethod
    def step(policy, seed, transitions, ppo_batch):
        return policy.learn_mode.forward(transitions(16, seed=seed))


@pytest.mark.parametrize("case", [DQN, SoftDQN, PPO, ContinuousPPO, BC])
def test_training_resumed_equals_training_never_stopped(
    case, small, transitions, ppo_batch, tmp_path
):
    def build(seed):
        model = {**small, **case.cfg.get("model", {})}
        return case.policy({**case.cfg, "model": model, "seed": seed})

    def train(policy, seeds):
        return [plain(case.step(policy, seed, transitions, ppo_batch)) for seed in seeds]

    straight, stopped = build(0), build(0)
    train(straight, range(10))
    train(stopped, range(10))
    save_checkpoint(tmp_path / "policy.ckpt", stopped.learn_mode.state_dict())
    resumed = build(1)
    resumed.learn_mode.load_state_dict(load_checkpoint(tmp_path / "policy.ckpt"))
    assert train(resumed, range(10, 20)) == train(straight, range(10, 20))
    same_states(resumed.learn_mode.state_dict(), straight.learn_mode.state_dict())


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_a_state_does_not_change_with_later_updates(small, transitions):
    policy = DQNPolicy({"model": small})
    policy.learn_mode.forward(transitions(8))
    state = policy.learn_mode.state_dict()
    frozen = {path: leaf.clone() for path, leaf in leaves(state) if isinstance(leaf, torch.Tensor)}
    policy.learn_mode.forward(transitions(8, seed=1))
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, frozen[path]), path


@pytest.mark.parametrize("mode", ["collect_mode", "eval_mode"])
def test_a_learners_state_serves_actors(small, transitions, mode):
    learner = DQNPolicy({"model": small, "seed": 0})
    learner.learn_mode.forward(transitions(8))
    actor = DQNPolicy({"model": small, "seed": 1}, modes=["collect", "eval"])
    getattr(actor, mode).load_state_dict(learner.learn_mode.state_dict())
    obs = torch.randn(50, 4)
    wanted = learner.collect_mode.forward(obs)["logit"]
    assert torch.equal(actor.collect_mode.forward(obs)["logit"], wanted)
    assert set(getattr(actor, mode).state_dict()) == {"model", "acting"}


def test_a_checkpoint_of_another_model_names_the_first_difference_and_loads_nothing(
    small, transitions
):
    other = DQNPolicy({"model": {**small, "encoder_hidden_sizes": [24]}})
    policy = DQNPolicy({"model": small})
    before = policy.learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch) as caught:
        policy.learn_mode.load_state_dict(other.learn_mode.state_dict())
    message = str(caught.value)
    first = next(iter(before["model"]))
    assert first in message
    assert "(24, 4)" in message
    assert "(16, 4)" in message
    same_states(policy.learn_mode.state_dict(), before)


def test_a_missing_and_an_extra_parameter_are_named(small):
    plain, dueling = (DQNPolicy({"model": {**small, "dueling": d}}) for d in (False, True))
    with pytest.raises(CheckpointMismatch, match=r"has no value_head\.\S+, which this policy"):
        dueling.eval_mode.load_state_dict(plain.eval_mode.state_dict())
    with pytest.raises(CheckpointMismatch, match=r"has value_head\.\S+ of shape .* lacks"):
        plain.eval_mode.load_state_dict(dueling.eval_mode.state_dict())


def test_a_target_network_that_differs_is_rejected_before_anything_is_loaded(small):
    policy, other = DQNPolicy({"model": small, "seed": 0}), DQNPolicy({"model": small, "seed": 1})
    state = other.learn_mode.state_dict()
    name = next(iter(state["target"]["q"]))
    state["target"]["q"][name] = torch.zeros(1)
    before = policy.learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch, match="target network"):
        policy.learn_mode.load_state_dict(state)
    same_states(policy.learn_mode.state_dict(), before)


def test_an_optimizer_of_other_parameters_is_rejected(small):
    policy = DQNPolicy({"model": small})
    state = policy.learn_mode.state_dict()
    state["optimizer"]["q"]["param_groups"][0]["params"] = [0]
    with pytest.raises(CheckpointMismatch, match="optimizer does not fit"):
        policy.learn_mode.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (DQNPolicy, "target"),
        (PPOPolicy, "target"),
    ],
)
def test_a_learner_rejects_what_an_actor_saved(small, make, missing):
    policy, other = make({"model": small, "seed": 0}), make({"model": small, "seed": 1})
    before = policy.learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch, match=rf"has no {missing}, only model.*learn_mode"):
        policy.learn_mode.load_state_dict(other.collect_mode.state_dict())
    same_states(policy.learn_mode.state_dict(), before)


def test_a_state_without_a_model_is_rejected(small):
    with pytest.raises(CheckpointMismatch, match="has no model, only nothing"):
        DQNPolicy({"model": small}).eval_mode.load_state_dict({})


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("mode", ["learn_mode", "collect_mode", "eval_mode"])
def test_observation_statistics_must_match_the_option(small, mode, chosen):
    policy = PPOPolicy({"model": small, "obs_norm": chosen, "seed": 0})
    other = PPOPolicy({"model": small, "obs_norm": not chosen, "seed": 1})
    before = policy.learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch, match=r"component obs_norm, but .* options"):
        getattr(policy, mode).load_state_dict(getattr(other, mode).state_dict())
    same_states(policy.learn_mode.state_dict(), before)


@pytest.mark.parametrize("chosen", [True, False])
def test_reward_statistics_must_match_the_option(small, chosen):
    policy = PPOPolicy({"model": small, "reward_norm": chosen, "seed": 0})
    other = PPOPolicy({"model": small, "reward_norm": not chosen, "seed": 1})
    before = policy.learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch, match=r"component reward_normalizer, but .* options"):
        policy.learn_mode.load_state_dict(other.learn_mode.state_dict())
    same_states(policy.learn_mode.state_dict(), before)
    policy.eval_mode.load_state_dict(other.learn_mode.state_dict())


@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_checkpoints_of_compiled_models_have_plain_names(small, transitions, compiled):
    source, twin = (DQNPolicy({"model": small, "seed": seed}) for seed in (1, 2))
    source, twin = (
        DQNPolicy({}, model=torch.compile(p.model, backend="eager")) if compiles else p
        for p, compiles in zip((source, twin), compiled, strict=True)
    )
    source.learn_mode.forward(transitions())
    saved = source.learn_mode.state_dict()
    assert not [name for name in (*saved["model"], *saved["target"]["q"]) if "_orig_mod" in name]
    twin.learn_mode.load_state_dict(saved)
    obs = torch.randn(5, 4)
    assert torch.equal(
        twin.collect_mode.forward(obs)["logit"], source.collect_mode.forward(obs)["logit"]
    )
    prefixed = {f"_orig_mod.{name}": value for name, value in saved["model"].items()}
    twin.eval_mode.load_state_dict({**saved, "model": prefixed})
