"""Updates.

One update of DQN (CartPole, 64 rows), PPO (Pendulum, 64 rows) and SAC (Pendulum, 256 rows) through
``policy.learn_mode.forward``, against a hand-written update of a copy of the same networks, with
torch's fused Adam and nothing that is checked or logged. "Compiled" is ``compile=True`` against the
same hand-written update as one function for ``torch.compile``: gradients by ``torch.autograd.grad``
and Adam in plain operations, because the fused kernel cannot be compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from dmiddleware.data import Batch, as_tree
from dmiddleware.policy import DQNPolicy, Policy, PPOPolicy, SACPolicy
from dmiddleware.rl import TanhGaussian
from tests.benchmarks import setting as S
from tests.benchmarks.report import Row, interleaved

CALLS = 100
EAGER_AT_LEAST = 0.95
COMPILED_AT_LEAST = 0.9
TARGET_EVERY = 500
TAU = 0.005

Columns = Mapping[str, torch.Tensor]


class Adam:
    """A hand-written optimizer: torch's fused Adam, or, to be compiled, its formula."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], lr: float, *, eps: float = 1e-8, plain: bool
    ) -> None:
        self.parameters, self.lr, self.eps = list(parameters), lr, eps
        self.fused = None
        if not plain:
            self.fused = torch.optim.Adam(self.parameters, lr=lr, eps=eps, fused=True)
        self.n_steps = torch.zeros(())
        self.first = [torch.zeros_like(one) for one in self.parameters]
        self.second = [torch.zeros_like(one) for one in self.parameters]

    def step(self, loss: torch.Tensor, *, max_norm: float | None = None) -> None:
        """Make one step down the gradient of a loss, clipped to a norm."""
        if self.fused is not None:
            self.fused.zero_grad()
            loss.backward(inputs=self.parameters)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters, max_norm)
            self.fused.step()
            return
        gradients = list(torch.autograd.grad(loss, self.parameters))
        with torch.no_grad():
            if max_norm is not None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_max(1.0))
            self.n_steps.add_(1.0)
            torch._foreach_lerp_(self.first, gradients, 0.1)
            torch._foreach_mul_(self.second, 0.999)
            torch._foreach_addcmul_(self.second, gradients, gradients, 0.001)
            root = torch._foreach_sqrt(self.second)
            torch._foreach_div_(root, (1.0 - 0.999**self.n_steps).sqrt())
            torch._foreach_add_(root, self.eps)
            moves = torch._foreach_div(self.first, root)
            torch._foreach_mul_(moves, -self.lr / (1.0 - 0.9**self.n_steps))
            torch._foreach_add_(self.parameters, moves)


class HandDQN:
    """Double DQN with a hard target update."""

    def __init__(self, policy: DQNPolicy, *, plain: bool) -> None:
        self.model = copy.deepcopy(policy.model)
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = Adam(list(self.model.parameters()), S.LEARNING_RATE, plain=plain)
        self.n_updates = 0

    def update(self, batch: Columns) -> None:
        with torch.no_grad():
            best = self.model(batch["next_obs"])["logit"].argmax(-1, keepdim=True)
            value = self.target(batch["next_obs"])["logit"].gather(1, best).squeeze(1)
            y = batch["reward"] + S.DISCOUNT * value * ~batch["terminated"]
        q = self.model(batch["obs"])["logit"].gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        self.optimizer.step(F.smooth_l1_loss(q, y))

    def after(self) -> None:
        self.n_updates += 1
        if self.n_updates % TARGET_EVERY == 0:
            self.target.load_state_dict(self.model.state_dict())


class HandPPO:
    """One minibatch of PPO with a Gaussian policy."""

    def __init__(self, policy: PPOPolicy, *, plain: bool) -> None:
        self.model = copy.deepcopy(policy.model)
        self.optimizer = Adam(list(self.model.parameters()), 3e-4, eps=1e-5, plain=plain)

    def update(self, batch: Columns) -> None:
        output = self.model(batch["obs"])
        mu, sigma, value = output["mu"], output["sigma"], output["value"]
        z = (batch["raw_action"] - mu) / sigma
        log_prob = (-0.5 * z.square() - sigma.log() - 0.9189385332).sum(-1)
        adv = batch["adv"]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (log_prob - batch["log_prob"]).exp()
        loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = loss + 0.25 * (value - batch["ret"]).square().mean()
        self.optimizer.step(loss, max_norm=0.5)

    def after(self) -> None: ...


class HandSAC:
    """Soft actor-critic with a tuned temperature."""

    def __init__(self, policy: SACPolicy, *, plain: bool) -> None:
        model = copy.deepcopy(policy.model)
        self.actor, self.critic = model.actor, model.critic
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.actor_optimizer = Adam(list(self.actor.parameters()), 3e-4, plain=plain)
        self.critic_optimizer = Adam(list(self.critic.parameters()), 3e-4, plain=plain)
        self.alpha_optimizer = Adam([self.log_alpha], 3e-4, plain=plain)
        self.online = list(self.critic.parameters())
        self.copies = list(self.target.parameters())

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.actor(obs)
        distribution = TanhGaussian(output["mu"], output["sigma"])
        action = distribution.rsample(noise=torch.randn_like(output["mu"]))
        return action, distribution.log_prob(action)

    def update(self, batch: Columns) -> None:
        alpha = self.log_alpha.detach().exp()
        action = batch["action"] / 2.0  # torques of the Pendulum, up to 2
        with torch.no_grad():
            next_action, next_log_prob = self.act(batch["next_obs"])
            value = self.target(batch["next_obs"], next_action).amin(0) - alpha * next_log_prob
            y = batch["reward"] + 0.99 * value * ~batch["terminated"]
        error = self.critic(batch["obs"], action) - y
        self.critic_optimizer.step(0.5 * error.square().sum(0).mean())
        chosen, log_prob = self.act(batch["obs"])
        self.actor_optimizer.step(
            (alpha * log_prob - self.critic(batch["obs"], chosen).amin(0)).mean()
        )
        self.alpha_optimizer.step(-(self.log_alpha * (log_prob.detach() - 1.0).mean()))
        with torch.no_grad():
            torch._foreach_lerp_(self.copies, self.online, TAU)

    def after(self) -> None: ...


def rows() -> list[Row]:
    """Measure each algorithm, eager and compiled."""
    measured = []
    for name, make, hand, make_batch in _CASES:
        for is_compiled in (False, True):
            measured.append(_row(name, make, hand, make_batch, is_compiled=is_compiled))
    return measured


def _row(
    name: str,
    make: Callable[..., Policy],
    hand: Callable[..., Any],
    make_batch: Callable[[Policy], Batch],
    *,
    is_compiled: bool,
) -> Row:
    policy = make(compile=is_compiled, seed=0)
    batch = make_batch(policy)
    columns = dict(batch.items())
    theirs = hand(policy, plain=is_compiled)
    update = theirs.update
    if is_compiled:
        update = torch.compile(update, fullgraph=True)

    def ours() -> None:
        policy.learn_mode.forward(batch)

    def reference() -> None:
        update(columns)
        theirs.after()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        pair = interleaved(ours, reference, calls=CALLS, warmup=2)
    kind = "compiled" if is_compiled else "eager"
    return Row.of_rate(
        f"{name} update, {kind}",
        pair,
        count=CALLS,
        unit="updates/s",
        against=f"hand-written, {kind}",
        at_least=COMPILED_AT_LEAST if is_compiled else EAGER_AT_LEAST,
    )


def _make_dqn(**options: Any) -> DQNPolicy:
    return DQNPolicy.for_env(
        S.make_env(),
        model={"encoder_hidden_sizes": list(S.HIDDEN_SIZES)},
        learning_rate=S.LEARNING_RATE,
        target_update_freq=TARGET_EVERY,
        **options,
    )


def _make_ppo(**options: Any) -> PPOPolicy:
    return PPOPolicy.for_env(gym.make("Pendulum-v1"), **options)


def _make_sac(**options: Any) -> SACPolicy:
    return SACPolicy.for_env(gym.make("Pendulum-v1"), target_tau=TAU, **options)


def _rows_of(policy: Policy, n: int, n_obs: int) -> dict[str, Any]:
    """Return what a collector stores: random observations, and the policy's actions in them."""
    generator = torch.Generator().manual_seed(0)
    obs, next_obs = torch.randn(2, n, n_obs, generator=generator).unbind()
    taken = {key: value for key, value in policy.collect_mode.forward(obs).items()}
    return {
        **taken,
        "obs": obs,
        "next_obs": next_obs,
        "reward": torch.randn(n, generator=generator),
        "terminated": torch.zeros(n, dtype=torch.bool),
    }


def _td_batch(n: int, n_obs: int) -> Callable[[Policy], Batch]:
    def make_batch(policy: Policy) -> Batch:
        columns = _rows_of(policy, n, n_obs)
        return as_tree({name: columns[name] for name in policy.learn_columns})

    return make_batch


def _ppo_batch(policy: Policy) -> Batch:
    columns = _rows_of(policy, 64, 3)
    adv = columns["reward"]
    columns |= {"adv": adv, "ret": columns["value"] + adv}
    return as_tree({name: columns[name] for name in (*policy.learn_columns, "raw_action")})


_CASES: list[tuple[str, Callable[..., Policy], Callable[..., Any], Any]] = [
    ("DQN", _make_dqn, HandDQN, _td_batch(S.BATCH_SIZE, S.OBS_SIZE)),
    ("PPO", _make_ppo, HandPPO, _ppo_batch),
    ("SAC", _make_sac, HandSAC, _td_batch(256, 3)),
]
