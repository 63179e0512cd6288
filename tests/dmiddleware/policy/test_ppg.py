"""Phasic policy gradient, from collected batches and from a replay buffer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, PolicyError, PolicyOutputError
from dmiddleware.model import ActorCritic
from dmiddleware.pipeline import Task
from dmiddleware.policy import OffPolicyPPGPolicy, PPGPolicy
from dmiddleware.testing import assert_resume_exact
from dmiddleware.tree import as_tree, with_columns
from middleware import (
    DataPusher,
    GAEEstimator,
    InteractionEvaluator,
    OffPolicyLearner,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}
BOX = {**SMALL, "obs_shape": 3, "action_space": "continuous"}
PHASES: dict[str, Any] = {"aux_freq": 2, "aux_train_epoch": 3, "grad_clip_norm": None}


def made(cls: Any = PPGPolicy, **options: Any) -> Any:
    return cls({"model": SMALL, "seed": 0, "batch_size": 100, **PHASES, **options})


def collected(policy: Any, seed: int = 0, n: int = 32) -> Any:
    """Return what the policy would collect, with advantages drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, policy.cfg.model["obs_shape"], generator=generator)
    adv = torch.randn(n, generator=generator)
    output = policy.collect_mode.forward(obs)
    return as_tree({**output, "obs": obs, "adv": adv, "ret": adv + output["value"]})


def state_of(policy: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = policy.learn_mode.state_dict()["model"]
    return state


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


class Reference:
    """Algorithm 1 of the paper in plain torch; each epoch is one minibatch of all rows."""

    def __init__(self, policy: Any) -> None:
        self.network = copy.deepcopy(policy.model)
        self.cfg, self.is_box = policy.cfg, "action_space" in policy.cfg.model
        adam = {"lr": policy.cfg.learning_rate, "eps": 1e-5}
        self.actor = torch.optim.Adam(self.network.actor.parameters(), **adam)
        self.auxiliary = torch.optim.Adam(self.network.auxiliary.parameters(), **adam)
        self.critic = torch.optim.Adam(self.network.critic.parameters(), **adam)
        self.rows: list[Any] = []

    def distribution(self, obs: torch.Tensor) -> Any:
        output = self.network.actor(obs)
        if self.is_box:
            normal = torch.distributions.Normal(output["mu"], output["sigma"])
            return torch.distributions.Independent(normal, 1)
        return torch.distributions.Categorical(logits=output["logit"])

    def step(self, loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
        self.network.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    def learn_values(self, obs: torch.Tensor, ret: torch.Tensor) -> None:
        value = self.network.critic(obs).squeeze(-1)
        self.step(0.5 * (value - ret).square().mean(), self.critic)

    def update(self, batch: Any) -> None:
        adv = (batch["adv"] - batch["adv"].mean()) / (batch["adv"].std() + 1e-8)
        for _ in range(self.cfg.actor_epoch_per_collect):
            distribution = self.distribution(batch["obs"])
            log_prob = distribution.log_prob(batch["raw_action" if self.is_box else "action"])
            ratio = (log_prob - batch["log_prob"]).exp()
            objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            self.step(-objective - 0.01 * distribution.entropy().mean(), self.actor)
        for _ in range(self.cfg.critic_epoch_per_collect):
            self.learn_values(batch["obs"], batch["ret"])
        self.rows.append(batch)
        if len(self.rows) == self.cfg.aux_freq:
            self.make_auxiliary_phase()

    def make_auxiliary_phase(self) -> None:
        obs, ret = (torch.cat([batch[name] for batch in self.rows]) for name in ("obs", "ret"))
        with torch.no_grad():
            old = self.distribution(obs)
        for _ in range(self.cfg.aux_train_epoch):
            self.learn_values(obs, ret)
            value = self.network.auxiliary(self.network.actor.encoder(obs)).squeeze(-1)
            kl = torch.distributions.kl_divergence(old, self.distribution(obs)).mean()
            loss = 0.5 * (value - ret).square().mean() + self.cfg.aux_bc_weight * kl
            self.step(loss, self.actor, self.auxiliary)
        self.rows = []


@pytest.mark.parametrize("model", [SMALL, BOX], ids=["discrete", "continuous"])
@pytest.mark.parametrize("epochs", [(1, 1), (2, 3)], ids=str)
def test_the_phases_are_those_of_the_paper(model: dict[str, Any], epochs: tuple[int, int]) -> None:
    options = dict(
        zip(("actor_epoch_per_collect", "critic_epoch_per_collect"), epochs, strict=True)
    )
    policy = made(model=model, learning_rate=0.01, aux_bc_weight=0.7, **options)
    reference = Reference(policy)
    for seed in range(5):  # two auxiliary phases, and a policy phase after them
        batch = collected(policy, seed)
        policy.learn_mode.forward(batch)
        reference.update(batch)
    wanted = reference.network.state_dict()
    for name, value in state_of(policy).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_the_losses_of_both_phases_are_logged() -> None:
    policy = made(learning_rate=0.01)
    first, second = (policy.learn_mode.forward(collected(policy, seed)) for seed in range(2))
    assert not {"aux_loss", "clone_kl"} & set(first)
    assert {"aux_loss", "clone_kl"} <= set(second) <= {*policy.reports}
    expected = first["policy_loss"] + first["value_loss"] - 0.01 * first["entropy"]
    assert first["total_loss"] == pytest.approx(expected, abs=1e-5)
    assert second["clone_kl"] > 0


def test_the_auxiliary_value_learns_in_the_auxiliary_phase_only() -> None:
    policy = made()
    states = [state_of(policy)]
    for seed in range(2):
        policy.learn_mode.forward(collected(policy, seed))
        states.append(state_of(policy))
    of_head = {name for name in states[0] if name.startswith("auxiliary")}
    assert of_head
    assert not of_head & changed(states[0], states[1])
    assert of_head <= changed(states[1], states[2])


def test_cloning_keeps_the_policy_while_its_features_learn_values() -> None:
    moved = {}
    for weight in (0.0, 100.0):
        policy = made(aux_freq=1, aux_train_epoch=30, learning_rate=1e-3, aux_bc_weight=weight)
        moved[weight] = policy.learn_mode.forward(collected(policy))["clone_kl"]
    assert moved[100.0] < 0.1 * moved[0.0]


def test_an_update_is_a_collected_batch_in_minibatches() -> None:
    policy = made(batch_size=8, learning_rate=0.01)
    policy.learn_mode.forward(collected(policy))
    assert policy.train_iter == 1
    steps = [slots["step"] for slots in optimizer_slots(policy, "critic")]
    assert {int(step) for step in steps} == {4}


def optimizer_slots(policy: Any, component: str) -> list[dict[str, torch.Tensor]]:
    return list(policy.learn_mode.state_dict()["optimizer"][component]["state"].values())


def test_masked_actions_have_no_part_in_either_phase() -> None:
    policy = made(aux_freq=1, learning_rate=0.1)
    mask = torch.tensor([[True, False]]).expand(32, 2)
    batch = with_columns(collected(policy), action_mask=mask, action=torch.zeros(32).long())
    batch["log_prob"] = torch.zeros(32)
    output = policy.learn_mode.forward(batch)
    assert output["entropy"] == pytest.approx(0.0)
    assert output["clone_kl"] == pytest.approx(0.0)


@pytest.mark.parametrize("cls", [PPGPolicy, OffPolicyPPGPolicy])
def test_a_policy_that_is_restored_makes_the_same_auxiliary_phase(cls: Any) -> None:
    options = {"aux_freq": 3, "batch_size": 8, "obs_norm": True}
    whole, first, second = made(cls, **options), made(cls, **options), made(cls, **options, seed=1)
    batches = [collected(made(cls), seed) for seed in range(5)]
    outputs = [whole.learn_mode.forward(batch) for batch in batches]
    for batch in batches[:2]:
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch) for batch in batches[2:]] == outputs[2:]
    assert "phase_rows" not in whole.collect_mode.state_dict()["acting"]


def test_an_interrupted_phase_is_resumed_exactly() -> None:
    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=1)
        policy = PPGPolicy.for_env(envs, seed=0, model={"encoder_hidden_sizes": [8]}, aux_freq=3)
        task, snapshots = Task(seed=0), SnapshotSaver(RunFolder(folder))
        task.use(StepCollector(policy, envs, n_sample=16)).use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy)).use(snapshots)
        return task, snapshots

    assert_resume_exact(main, n_step=4, stop_after=[2])


def test_values_can_learn_from_other_rows_than_the_policy() -> None:
    still = {"learning_rate": 1e-9, "aux_freq": 1}  # so that each loss is that of the start
    policy = made(OffPolicyPPGPolicy, **still)
    rows, others = collected(policy, 0), collected(policy, 1)
    both = with_columns(rows, valued_rows={"obs": others["obs"], "ret": others["ret"]})
    output = policy.learn_mode.forward(both)
    network = policy.model
    with torch.no_grad():
        value = network.critic(others["obs"]).squeeze(-1)
        auxiliary = network.auxiliary(network.actor.encoder(others["obs"])).squeeze(-1)
    for name, estimate in (("value_loss", value), ("aux_loss", auxiliary)):
        wanted = 0.5 * (estimate - others["ret"]).square().mean().item()
        assert output[name] == pytest.approx(wanted, rel=1e-4)
    of_rows = made(OffPolicyPPGPolicy, **still).learn_mode.forward(rows)
    assert output["policy_loss"] == of_rows["policy_loss"]


def test_off_policy_updates_come_from_a_buffer() -> None:
    buffer = TensorBuffer(64, seed=0)
    with Task(seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = OffPolicyPPGPolicy.for_env(envs, seed=0, batch_size=16)
        task.use(StepCollector(policy, envs, n_sample=32)).use(GAEEstimator(policy))
        task.use(DataPusher(buffer, what="train_data"))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=7))
        task.run(max_step=1)
    assert task.ctx.train_iter == 7
    outputs = task.ctx.train_output
    assert ["clone_kl" in output for output in outputs] == [False] * 4 + [True] + [False] * 2


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (PPGPolicy, {"epoch_per_collect": 2}),
        (PPGPolicy, {"aux_freq": 0}),
        (PPGPolicy, {"aux_bc_weight": -1.0}),
        (OffPolicyPPGPolicy, {"actor_epoch_per_collect": 2}),
    ],
)
def test_what_the_phases_cannot_have_is_refused(cls: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        made(cls, **option)


def test_a_network_without_phases_is_refused() -> None:
    with pytest.raises(PolicyError, match="submodule actor"):
        PPGPolicy({}, model=ActorCritic(4, 2))


def test_an_actor_without_features_is_refused(cartpole_spaces: Any) -> None:
    class Phasic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
            self.auxiliary = torch.nn.Linear(2, 1)

        def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logit": self.actor(obs), "value": self.critic(obs)}

    with pytest.raises(PolicyOutputError, match="features"):
        PPGPolicy.for_env(cartpole_spaces, model=Phasic())


@pytest.mark.learning
@pytest.mark.parametrize("cls", [PPGPolicy, OffPolicyPPGPolicy])
def test_it_learns_which_action_pays(cls: Any) -> None:
    """One step: the reward is 1 if the action is the sign of the first entry of obs."""
    policy = made(cls, learning_rate=5e-3, aux_freq=10)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        obs = torch.randn(64, 4, generator=generator)
        output = policy.collect_mode.forward(obs)
        reward = (output["action"] == (obs[:, 0] > 0)).float()
        rows = {**output, "obs": obs, "adv": reward - output["value"], "ret": reward}
        policy.learn_mode.forward(as_tree(rows))
    obs = torch.randn(500, 4, generator=generator)
    action = policy.eval_mode.forward(obs)["action"]
    assert (action == (obs[:, 0] > 0)).float().mean().item() > 0.9


@pytest.mark.slow
@pytest.mark.learning
def test_cartpole_is_learned() -> None:
    with Task(seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=8, seed=task.seed_for("collector"))
        eval_envs = make_env_manager("CartPole-v1", env_num=8, seed=task.seed_for("evaluator"))
        policy = PPGPolicy.for_env(envs, seed=0, batch_size=64, learning_rate=1e-3, aux_freq=8)
        evaluator = InteractionEvaluator(
            policy, eval_envs, n_episode=16, every_train_iter=8, stop_value=195.0
        )
        task.use(StepCollector(policy, envs, n_sample=512)).use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy)).use(evaluator)
        task.use(TerminationChecker(max_env_step=80_000))
        task.run()
    assert task.ctx.eval_value >= 195.0
