import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.classic.monitored import monitored_of
from dmiddleware.errors import CheckpointMismatch, ConfigError, NonFiniteLoss, SpaceError
from dmiddleware.policy import (
    IPPOPolicy,
    MAPPOPolicy,
    PPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
)
from dmiddleware.rl import Counters, RunningMeanStd, Schedule
from dmiddleware.settings import describe
from dmiddleware.tree import as_tree, leaves
from tests.dmiddleware.policy.every_policy import batch_for, made


@pytest.fixture
def continuous():
    return {
        "obs_shape": 3,
        "action_shape": 2,
        "action_space": "continuous",
        "encoder_hidden_sizes": [16],
    }


def test_collecting_gives_discrete_actions_with_their_log_probability(small):
    policy = PPOPolicy({"model": small})
    output = policy.collect_mode.forward(torch.randn(6, 4))
    assert set(output) == {"action", "log_prob", "logit", "value"}
    assert output["action"].dtype == torch.int64
    wanted = torch.log_softmax(output["logit"], -1).gather(1, output["action"][:, None]).squeeze(1)
    torch.testing.assert_close(output["log_prob"], wanted)
    assert output["value"].shape == (6,)


def test_collecting_gives_continuous_draws_and_what_the_env_gets(continuous):
    policy = PPOPolicy({"model": continuous, "action_low": [-2, 0], "action_high": [2, 1]})
    output = policy.collect_mode.forward(torch.randn(500, 3))
    assert set(output) == {"action", "raw_action", "log_prob", "mu", "sigma", "value"}
    normal = torch.distributions.Normal(output["mu"], output["sigma"])
    torch.testing.assert_close(output["log_prob"], normal.log_prob(output["raw_action"]).sum(-1))
    low, high = output["action"].amin(0), output["action"].amax(0)
    assert low.tolist() == [-2.0, 0.0]
    assert high.tolist() == [2.0, 1.0]


def test_evaluating_is_greedy_and_draws_nothing(small, continuous):
    discrete, gaussian = PPOPolicy({"model": small}), PPOPolicy({"model": continuous})
    for policy, size in ((discrete, 4), (gaussian, 3)):
        before = policy.generator.get_state()
        obs = torch.randn(5, size)
        action = policy.eval_mode.forward(obs)["action"]
        output = policy.collect_mode.forward(obs)
        wanted = output["logit"].argmax(-1) if "logit" in output else output["mu"]
        torch.testing.assert_close(action, wanted)
        assert not torch.equal(policy.generator.get_state(), before)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_the_loss_equals_the_equations_of_the_paper(small, continuous, ppo_batch, kind):
    learn = {"entropy_weight": 0.03, "clip_ratio": 0.1, "value_clip": 0.05, "learning_rate": 0.02}
    model, size = (small, 4) if kind == "discrete" else (continuous, 3)
    bounds = {} if kind == "discrete" else {"action_low": [-2, 0], "action_high": [2, 1]}
    policy = PPOPolicy({"model": model, **learn, "seed": 0, **bounds})
    batch = ppo_batch(policy, obs_size=size)
    policy.learn_mode.forward(batch)  # so that ratios differ from 1
    output = policy.model(batch["obs"])
    if kind == "discrete":
        distribution = torch.distributions.Categorical(logits=output["logit"])
        log_prob, entropy = distribution.log_prob(batch["action"]), distribution.entropy()
    else:
        distribution = torch.distributions.Normal(output["mu"], output["sigma"])
        log_prob = distribution.log_prob(batch["raw_action"]).sum(-1)
        entropy = distribution.entropy().sum(-1)
    ratio = (log_prob - batch["log_prob"]).exp()
    adv = (batch["adv"] - batch["adv"].mean()) / (batch["adv"].std() + 1e-8)
    policy_loss = -torch.minimum(ratio * adv, ratio.clamp(0.9, 1.1) * adv).mean()
    clipped = batch["value"] + (output["value"] - batch["value"]).clamp(-0.05, 0.05)
    errors = torch.maximum((output["value"] - batch["ret"]) ** 2, (clipped - batch["ret"]) ** 2)
    value_loss = 0.5 * errors.mean()
    wanted = policy_loss + 0.5 * value_loss - 0.03 * entropy.mean()
    got = policy.learn_mode.forward(batch)
    assert got["total_loss"] == pytest.approx(wanted.item(), rel=1e-4)
    assert got["policy_loss"] == pytest.approx(policy_loss.item(), abs=1e-5)
    assert got["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert got["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert 0 < got["clip_fraction"] < 1
    assert got["kl_stop"] is False
    assert set(monitored_of(type(policy))) <= set(got)


def test_the_first_minibatch_sees_ratios_of_1(small, ppo_batch):
    policy = PPOPolicy({"model": small})
    answer = policy.learn_mode.forward(ppo_batch(policy))
    assert answer["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert answer["clip_fraction"] == 0


def test_the_advantage_of_a_single_row_is_not_normalized(small, ppo_batch):
    policy = PPOPolicy({"model": small})
    assert np.isfinite(policy.learn_mode.forward(ppo_batch(policy, n=1))["total_loss"])


def test_a_policy_that_moved_too_far_makes_no_step_and_reports_kl_stop(small, ppo_batch):
    policy = PPOPolicy({"model": small, "target_kl": 0.01, "learning_rate": 0.05})
    batch = ppo_batch(policy)
    stopped = None
    for _ in range(20):
        before = policy.learn_mode.state_dict()
        answer = policy.learn_mode.forward(batch)
        assert answer["kl_stop"] is (answer["approx_kl"] > 0.01)
        if answer["kl_stop"]:
            stopped = answer
            break
    assert stopped is not None
    after = policy.learn_mode.state_dict()
    assert after["train_iter"] == before["train_iter"]
    assert all(torch.equal(before["model"][k], after["model"][k]) for k in before["model"])
    assert "cur_lr" in stopped


@pytest.mark.parametrize(
    "cls", [PPOPolicy, RecurrentPPOPolicy, IPPOPolicy, MAPPOPolicy, RecurrentMAPPOPolicy]
)
def test_target_kl_is_the_divergence_at_which_learning_stops(cls):
    batch = batch_for(made(cls))
    for target_kl in (1e-3, 1e-2, 1.0):
        policy = made(cls, target_kl=target_kl, learning_rate=0.02)
        outputs = [policy.learn_mode.forward(batch) for _ in range(5)]
        stops = [output["kl_stop"] for output in outputs]
        assert stops == [output["approx_kl"] > target_kl for output in outputs]
    assert "1.5 times" in next(
        s.meaning for s in describe(PPOPolicy.settings_class()) if s.name == "target_kl"
    )


def test_the_learning_rate_falls_linearly_to_zero(small, ppo_batch):
    falling = Schedule.linear(1.0e-3, 0.0, decay=4, by="update")
    policy = PPOPolicy({"model": small, "learning_rate": falling})
    batch = ppo_batch(policy)
    got = [policy.learn_mode.forward(batch)["cur_lr"] for _ in range(6)]
    assert got == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0, 0.0])


def test_clip_range_and_entropy_weight_follow_their_schedules(small, ppo_batch):
    def losses(**learn):
        policy = PPOPolicy({"seed": 0, "model": small, "learning_rate": 0.1, **learn})
        batch = ppo_batch(policy)
        return [policy.learn_mode.forward(batch) for _ in range(3)]

    narrow = {"type": "piecewise", "points": [(0, 0.2), (1, 1e-6)], "by": "update"}
    wide, clipped = losses(clip_ratio=0.2), losses(clip_ratio=narrow)
    assert clipped[0] == wide[0]
    assert clipped[1]["clip_fraction"] == 1.0 > wide[1]["clip_fraction"]
    rising = Schedule.piecewise([(0, 0.0), (2, 2.0)], by="update")
    plain, bonus = losses(), losses(entropy_weight=rising)
    assert bonus[0]["total_loss"] == plain[0]["total_loss"]
    parts = bonus[1]
    expected = parts["policy_loss"] + 0.5 * parts["value_loss"] - 1.0 * parts["entropy"]
    assert parts["total_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_learning_rate_by_env_step_needs_that_counter(small, ppo_batch):
    falling = Schedule.linear(1.0e-3, 0.0, decay=100)
    policy = PPOPolicy({"model": small, "learning_rate": falling})
    batch = ppo_batch(policy)
    with pytest.raises(ConfigError, match="by env_step needs that counter"):
        policy.learn_mode.forward(batch)
    policy.learn_mode.spec.set_counters(Counters(env_step=25))
    assert policy.learn_mode.forward(batch)["cur_lr"] == pytest.approx(7.5e-4)


def test_the_gradient_is_clipped(small, ppo_batch):
    policy = PPOPolicy({"model": small, "grad_clip_norm": 0.02})
    assert policy.learn_mode.forward(ppo_batch(policy))["grad_norm"] > 0.02
    gradients = [p.grad.flatten() for p in policy.model.parameters()]
    assert torch.cat(gradients).norm().item() == pytest.approx(0.02, rel=1e-3)


def test_the_network_starts_orthogonal(small):
    policy = PPOPolicy({"model": small})
    weights = [p for p in policy.model.parameters() if p.dim() == 2]
    first = weights[0]
    gram = first.T @ first
    torch.testing.assert_close(gram / gram[0, 0], torch.eye(4), atol=1e-5, rtol=0)


def test_a_loss_that_is_not_finite_is_rejected(small, ppo_batch):
    policy = PPOPolicy({"model": small})
    batch = ppo_batch(policy)
    batch["ret"][0] = float("inf")
    with pytest.raises(NonFiniteLoss, match="total_loss is inf"):
        policy.learn_mode.forward(batch)


def test_the_value_function_takes_any_leading_dimensions(small):
    policy = PPOPolicy({"model": small})
    value_fn = policy.learn_mode.spec.value_fn
    obs = torch.randn(5, 3, 4)
    value = value_fn(obs)
    assert value.shape == (5, 3)
    assert not value.requires_grad
    torch.testing.assert_close(
        value.flatten(), policy.collect_mode.forward(obs.flatten(0, 1))["value"]
    )


def test_the_value_function_is_computed_without_dropout(small):
    class DropsOut(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, obs):
            output = self.layer(self.dropout(obs))
            return {"logit": output[..., :2], "value": output[..., 2]}

    policy = PPOPolicy({"seed": 0}, model=DropsOut().train(), modes=["learn"])
    value_fn = policy.learn_mode.spec.value_fn
    obs = torch.ones(50, 4)
    assert torch.equal(value_fn(obs), value_fn(obs))


def test_observations_are_normalized_by_what_was_seen_before_learning(small):
    policy = PPOPolicy({"model": small, "obs_norm": True, "seed": 0})
    twin = PPOPolicy({"model": small, "seed": 0})
    seen = [5 + 3 * torch.randn(8, 4) for _ in range(3)]
    outputs = [policy.collect_mode.forward(obs) for obs in seen]
    stats = RunningMeanStd((4,))
    for obs, output in zip(seen, outputs, strict=True):
        stats.update(obs)
        wanted = twin.collect_mode.forward(stats.normalize(obs))
        torch.testing.assert_close(output["logit"], wanted["logit"])
    # What evaluating and valuing see changes nothing.
    before = dict(leaves(policy.collect_mode.state_dict()["acting"]["obs_norm"]))
    policy.eval_mode.forward(torch.full((4, 4), 100.0))
    policy.value_fn(torch.full((4, 4), 100.0))
    after = dict(leaves(policy.collect_mode.state_dict()["acting"]["obs_norm"]))
    assert before.keys() == after.keys()
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)


def test_statistics_do_not_change_between_collecting_a_batch_and_learning_from_it(small, ppo_batch):
    policy = PPOPolicy({"model": small, "obs_norm": True})
    policy.learn_mode.forward(ppo_batch(policy))
    for seed in range(1, 4):
        obs, outputs = [], []
        for step in range(5):  # each step's observations are unlike the last one's
            obs.append(torch.randn(6, 4) * step + seed)
            outputs.append(policy.collect_mode.forward(obs[-1]))
        rows = {key: torch.cat([output[key] for output in outputs]) for key in outputs[0]}
        adv = torch.randn(30)
        batch = as_tree({**rows, "obs": torch.cat(obs), "adv": adv, "ret": adv + rows["value"]})
        torch.testing.assert_close(
            policy.value_fn(batch["obs"]), rows["value"], rtol=1e-4, atol=1e-5
        )
        answer = policy.learn_mode.forward(batch)
        assert answer["approx_kl"] == pytest.approx(0, abs=1e-6)
        assert answer["clip_fraction"] == 0


def test_rewards_are_scaled_by_the_running_return(small):
    policy = PPOPolicy({"model": small, "reward_norm": True, "discount": 0.9})
    scale_rewards = policy.learn_mode.spec.scale_rewards
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(2)
    running, returns = torch.zeros(2, dtype=torch.float64), []
    for _ in range(4):
        reward = torch.randn(6, 2, generator=generator) * 5
        done = torch.rand(6, 2, generator=generator) < 0.3
        column = []
        for t in range(6):
            running = 0.9 * running + reward[t]
            returns.append(running.clone())
            running = running.masked_fill(done[t], 0)
            column.append(ids)
            ids = ids + 2 * done[t]
        scale = torch.stack(returns).var(unbiased=False).add(1e-8).sqrt()
        batch = as_tree({"reward": reward, "done": done, "episode_id": torch.stack(column)})
        assert policy.collect_mode.train_batch(batch) is batch, "collectors scale nothing"
        got = scale_rewards(batch)
        torch.testing.assert_close(got, (reward / scale).float())
        assert torch.equal(batch["reward"], reward), "the batch given stays as it was"
        assert got.dtype == torch.float32


def test_rewards_of_whole_episodes_are_scaled_too(small):
    lanes, episodes = (PPOPolicy({"model": small, "reward_norm": True}) for _ in range(2))
    rows = {
        "reward": torch.randn(5),
        "done": torch.tensor([False] * 4 + [True]),
        "episode_id": torch.full((5,), 7),
    }
    column = lanes.scale_rewards(as_tree({key: leaf[:, None] for key, leaf in rows.items()}))
    assert torch.equal(episodes.scale_rewards(as_tree(rows)), column[:, 0])


def test_bounds_come_from_the_first_spaces(continuous, pendulum_spaces):
    policy = PPOPolicy.for_env(pendulum_spaces, model={"encoder_hidden_sizes": [8]})
    assert policy.cfg.model["action_space"] == "continuous"
    output = policy.collect_mode.forward(torch.randn(300, 3))
    assert output["action"].abs().max().item() == 2.0
    torch.testing.assert_close(output["action"], (2 * output["raw_action"]).clamp(-2, 2))
    obs = 1000 * torch.randn(300, 3)
    mu = policy.model(obs)["mu"].detach()
    greedy = policy.eval_mode.forward(obs)["action"]
    torch.testing.assert_close(greedy, (2 * mu).clamp(-2, 2))
    assert not torch.equal(greedy, mu)
    wider = gym.spaces.Box(-3.0, 3.0, (1,), np.float32)
    with pytest.raises(SpaceError, match=r"from \[-2.0\] to \[2.0\].*takes \[-3.0\] to \[3.0\]"):
        policy.check_spaces(pendulum_spaces[0], wider)


def test_bounds_are_not_adopted_once_the_policy_has_learned(pendulum_spaces, ppo_batch):
    model = {"obs_shape": 3, "action_shape": 1, "action_space": "continuous"}
    policy = PPOPolicy({"model": model})
    policy.learn_mode.forward(ppo_batch(policy, obs_size=3))
    policy.check_spaces(*pendulum_spaces)
    output = policy.collect_mode.forward(torch.randn(50, 3))
    assert torch.equal(output["action"], output["raw_action"])


def test_bounds_travel_with_the_checkpoint(pendulum_spaces):
    model = {"obs_shape": 3, "action_shape": 1, "action_space": "continuous"}
    trained, fresh = PPOPolicy.for_env(pendulum_spaces), PPOPolicy({"model": model})
    fresh.eval_mode.load_state_dict(trained.learn_mode.state_dict())
    obs = 100 * torch.randn(40, 3)
    assert torch.equal(
        fresh.eval_mode.forward(obs)["action"], trained.eval_mode.forward(obs)["action"]
    )


def test_normalizing_observations_needs_their_shape(small):
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, obs):
            out = self.layer(obs)
            return {"logit": out[..., :2], "value": out[..., 2]}

    with pytest.raises(ConfigError, match=r"set model\.obs_shape"):
        PPOPolicy({"obs_norm": True}, model=Bare())
    policy = PPOPolicy({"obs_norm": True, "model": {"obs_shape": 4}}, model=Bare())
    policy.collect_mode.forward(torch.randn(3, 4))
    assert policy.value_fn(torch.randn(3, 4)).shape == (3,)


def test_checking_spaces_adds_nothing_to_the_observation_statistics(cartpole_spaces):
    class Plain(torch.nn.Module):
        obs_shape = 4

        def forward(self, obs):
            return {"logit": obs[:, :2], "value": obs[:, 0]}

    policy = PPOPolicy({"obs_norm": True}, model=Plain(), modes=["collect"])
    before = dict(leaves(policy.collect_mode.state_dict()["acting"]["obs_norm"]["running"]))
    policy.check_spaces(*cartpole_spaces)
    after = dict(leaves(policy.collect_mode.state_dict()["acting"]["obs_norm"]["running"]))
    assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before)


def test_value_clipping_is_off_by_default():
    assert PPOPolicy.settings_class()().value_clip is None


def test_a_learner_that_never_saw_an_env_leaves_the_bounds_open(pendulum_spaces, ppo_batch):
    model = {"obs_shape": 3, "action_shape": 1, "action_space": "continuous"}
    actor, learner, evaluator = (PPOPolicy({"model": model}) for _ in range(3))
    actor.check_spaces(*pendulum_spaces)
    learner.learn_mode.forward(ppo_batch(actor, obs_size=3))
    evaluator.learn_mode.load_state_dict(learner.learn_mode.state_dict())
    evaluator.check_spaces(*pendulum_spaces)
    (bounds,) = evaluator.collect_mode.state_dict()["acting"]["action_codec"]["parts"].values()
    assert (bounds["low"].tolist(), bounds["high"].tolist()) == ([-2.0], [2.0])


def test_a_policy_that_acted_without_bounds_stays_without(pendulum_spaces):
    model = {"obs_shape": 3, "action_shape": 1, "action_space": "continuous"}
    actor, evaluator = (PPOPolicy({"model": model}) for _ in range(2))
    actor.collect_mode.forward(torch.randn(2, 3))
    evaluator.learn_mode.load_state_dict(actor.learn_mode.state_dict())
    evaluator.check_spaces(*pendulum_spaces)
    (part,) = evaluator.collect_mode.state_dict()["acting"]["action_codec"]["parts"].values()
    assert "low" not in part


def normalized(small, ret, **options):
    policy = PPOPolicy({"model": small, "seed": 0, "value_norm": True, **options})
    policy.observe_returns(ret)
    return policy


def test_values_are_not_clipped_by_default():
    assert PPOPolicy.settings_class()().value_clip is None


def test_a_critic_of_normalized_returns_answers_in_units_of_the_return(small):
    ret = torch.tensor([90.0, 110.0, 100.0])
    policy, plain = normalized(small, ret), PPOPolicy({"model": small, "seed": 0})
    obs = torch.randn(5, 4)
    raw = plain.collect_mode.forward(obs)["value"]
    deviation = ret.double().std(correction=0)
    expected = (100.0 + raw * deviation).float()
    torch.testing.assert_close(policy.collect_mode.forward(obs)["value"], expected)
    torch.testing.assert_close(policy.value_fn(obs), expected)


def test_a_critic_learns_normalized_returns_and_clips_in_their_units(small, ppo_batch):
    ret = torch.tensor([90.0, 110.0, 100.0])
    policy = normalized(small, ret, value_clip=0.1)
    batch = ppo_batch(policy)
    batch["ret"] = 100.0 + 50.0 * torch.randn(len(batch["ret"]))
    deviation = ret.double().std(correction=0)
    target, old = ((batch[name] - 100.0) / deviation for name in ("ret", "value"))
    with torch.no_grad():
        value = policy.model(batch["obs"])["value"]
    clipped = old + (value - old).clamp(-0.1, 0.1)
    expected = 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
    got = policy.learn_mode.forward(batch)["value_loss"]
    assert got == pytest.approx(float(expected), rel=1e-4)


def test_collectors_and_checkpoints_have_the_statistics_of_returns(small):
    policy = normalized(small, torch.tensor([1.0, 5.0]))
    other = normalized(small, torch.zeros(1))
    other.collect_mode.load_state_dict(policy.collect_mode.state_dict())
    obs = torch.randn(5, 4)
    assert torch.equal(
        other.collect_mode.forward(obs)["value"], policy.collect_mode.forward(obs)["value"]
    )
    with pytest.raises(CheckpointMismatch, match="component return_stats"):
        PPOPolicy({"model": small}).learn_mode.load_state_dict(policy.learn_mode.state_dict())
