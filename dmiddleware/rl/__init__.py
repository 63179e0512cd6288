"""Returns, advantages, losses, exploration and normalization: functions on tensors."""

from dmiddleware.rl.distribution import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    Hybrid,
    MultiCategorical,
    TanhGaussian,
    mask_logit,
)
from dmiddleware.rl.distributional import (
    categorical_target,
    clipped_share,
    quantile_huber_loss,
)
from dmiddleware.rl.exploration import epsilon_greedy
from dmiddleware.rl.imitation import bc_hits, bc_loss
from dmiddleware.rl.normalize import RewardNormalizer, RunningMeanStd
from dmiddleware.rl.ppo_loss import PPOPolicyLoss, ppo_policy_loss, ppo_value_loss
from dmiddleware.rl.recurrence import discounted_scan
from dmiddleware.rl.returns import (
    Advantage,
    NStepReturn,
    discounted_return,
    explained_variance,
    gae,
    lambda_return,
    nstep_return,
    take_rows,
)
from dmiddleware.rl.td import (
    TDLoss,
    ensemble_td_loss,
    q_target,
    sequence_priority,
    soft_value,
    taken_rows,
    td_loss,
    td_target,
    weighted_mean,
)
from dmiddleware.rl.trajectories import (
    episode_cuts,
    with_advantages,
    with_nstep_returns,
    with_returns_to_go,
)
from dmiddleware.rl.value_rescaling import rescale_value, unscale_value
from dmiddleware.rl.vtrace import VTrace, vtrace
from dmiddleware.schedule import Counters, Schedule

__all__ = [
    "gae",
    "Advantage",
    "nstep_return",
    "NStepReturn",
    "take_rows",
    "with_nstep_returns",
    "with_advantages",
    "with_returns_to_go",
    "episode_cuts",
    "discounted_return",
    "lambda_return",
    "explained_variance",
    "discounted_scan",
    "vtrace",
    "VTrace",
    "td_target",
    "q_target",
    "soft_value",
    "td_loss",
    "ensemble_td_loss",
    "weighted_mean",
    "TDLoss",
    "categorical_target",
    "clipped_share",
    "quantile_huber_loss",
    "taken_rows",
    "sequence_priority",
    "rescale_value",
    "unscale_value",
    "ppo_policy_loss",
    "PPOPolicyLoss",
    "ppo_value_loss",
    "bc_loss",
    "bc_hits",
    "Schedule",
    "Counters",
    "epsilon_greedy",
    "Distribution",
    "Categorical",
    "MultiCategorical",
    "Bernoulli",
    "Gaussian",
    "TanhGaussian",
    "Hybrid",
    "mask_logit",
    "RunningMeanStd",
    "RewardNormalizer",
]
