"""The same policies on a GPU."""

import pytest
import torch

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.errors import NonFiniteLoss
from dmiddleware.policy import BCPolicy, DQNPolicy, IQNPolicy, PPOPolicy, RainbowPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.tree import leaves, to_device
from middleware import GAEEstimator, OnPolicyLearner, StepCollector
from tests.dmiddleware.recurrent_policy import GRUPolicy, masked_cartpole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def pair(policy, cfg):
    return policy({**cfg, "seed": 0}), policy({**cfg, "seed": 0, "cuda": True})


def assert_close(ours, theirs):
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(value.cpu(), theirs[path].cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", [DQNPolicy, IQNPolicy, RainbowPolicy])
def test_q_learning_is_the_same_on_both_devices(small, transitions, policy):
    cfg = {"model": small, "n_step": 1, "target_update_freq": 3, "grad_clip_norm": 1.0}
    host, device = pair(policy, cfg)
    for seed in range(6):
        batch = transitions(32, seed=seed, weight=torch.rand(32))
        ours, theirs = (dict(one.learn_mode.forward(batch)) for one in (host, device))
        assert ours.pop("priority").shape == theirs.pop("priority").shape
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-3)
    assert_close(host.learn_mode.state_dict()["model"], device.learn_mode.state_dict()["model"])


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_ppo_collects_and_learns_the_same_on_both_devices(small, ppo_batch, kind):
    model = {**small, "action_space": kind}
    bounds = {"action_low": [-1, -1], "action_high": [1, 1]} if kind == "continuous" else {}
    cfg = {"model": model, "obs_norm": True, "reward_norm": True, **bounds}
    host, device = pair(PPOPolicy, cfg)
    for seed in range(3):
        ours, theirs = ppo_batch(host, seed=seed), ppo_batch(device, seed=seed)
        assert_close(ours, theirs)
        assert all(leaf.device.type == "cpu" for _, leaf in leaves(theirs))
        answers = [p.learn_mode.forward(b) for p, b in ((host, ours), (device, theirs))]
        assert answers[0] == pytest.approx(answers[1], rel=1e-2, abs=1e-3)
    assert device.value_fn(torch.randn(2, 3, 4)).device.type == "cpu"


def test_observations_of_another_process_count_on_both_devices(small):
    host, device = pair(PPOPolicy, {"model": small, "obs_norm": True})
    for policy in (host, device):
        policy.observe(torch.arange(40.0).reshape(10, 4))
        policy.observe(torch.ones(5, 4))
    obs = torch.randn(6, 4)
    assert_close(host.collect_mode.forward(obs), device.collect_mode.forward(obs))


def test_bc_takes_batches_that_are_on_the_device_already(small, transitions):
    model = {**small, "action_space": "continuous"}
    policy = BCPolicy({"model": model, "cuda": True, "action_low": [0, 0], "action_high": [1, 1]})
    batch = to_device(transitions(8, action=torch.rand(8, 2)), "cuda")
    policy.learn_mode.forward(batch)
    assert policy.eval_mode.forward(torch.randn(3, 4))["action"].device.type == "cpu"


def test_a_state_moves_between_devices(small, transitions):
    host, device = pair(DQNPolicy, {"model": small})
    device.learn_mode.forward(transitions(16))
    host.learn_mode.load_state_dict(device.learn_mode.state_dict())
    batch = transitions(16, seed=1)
    ours, theirs = host.learn_mode.forward(batch), device.learn_mode.forward(batch)
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_loss_that_is_not_finite_is_rejected(small, transitions):
    batch = transitions(4)
    batch["reward"][0] = float("nan")
    with pytest.raises(NonFiniteLoss, match="train_iter 7 to 10"):
        DQNPolicy({"model": small, "cuda": True}).learn_mode.forward(batch)


def test_a_recurrent_policy_acts_with_a_state_that_the_collector_holds_on_the_cpu():
    batches = []
    for cuda in (False, True):
        with masked_cartpole(2, seed=0) as envs:
            policy = GRUPolicy(cuda=cuda)
            batches.append(RolloutCollector(policy, envs).collect(40))
            assert len(evaluate_episodes(policy, envs, 2).get_episode_return()) == 2
    assert all(leaf.device.type == "cpu" for _, leaf in leaves(batches[1]))
    assert_close(*batches)


def test_groups_of_observations_are_collected_and_learned_on_a_device():
    groups = {"actor": ["proprio", "scan"], "critic": ["proprio", "beacon"]}
    rows = []
    with Task(seed=0) as task:
        envs = make_env_manager(
            "dmiddleware.zoo.tensor_envs:Rover", env_num=16, seed=0, env_kwargs={"device": "cuda"}
        )
        policy = PPOPolicy.for_env(envs, seed=0, cuda=True, obs_groups=groups, obs_norm=True)
        task.use(StepCollector(policy, envs, n_sample=16 * 64))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(lambda ctx: rows.append((ctx.trajectories, ctx.trajectory_end_idx)))
        task.run(max_step=2)
    for trajectories, ends in rows:
        assert set(trajectories["obs"].keys()) == {"proprio", "scan", "beacon"}
        assert trajectories["obs"]["scan"].is_cuda
        assert torch.equal(trajectories["done"].flatten().nonzero()[:, 0].cpu(), ends)
