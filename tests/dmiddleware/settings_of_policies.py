"""The settings of every stock algorithm, as dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypeAlias

from annotated_types import Gt, Le, Lt

from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import (
    At,
    Count,
    Fraction,
    NonNegative,
    Number,
    Numbers,
    Options,
    Positive,
    Settings,
    Whole,
)

Tau: TypeAlias = Annotated[float, Gt(0), Le(1)]
"""The fraction of the way that a target update moves."""


class PolicySettings(Settings):
    """What all policies have."""

    cuda: bool = False
    """Whether to put the model on the GPU."""
    multi_gpu: bool = False
    """Whether to average gradients over the ranks of torch.distributed."""
    bp_update_sync: bool = True
    """With multi_gpu: False overlaps the averaging of gradients with backward."""
    seed: Whole | None = None
    """Seed of the initial weights and of acting; None uses torch's seed."""
    model: Options = dataclasses.field(default_factory=dict)
    """The network: `type` (a registered name) and the arguments of its class."""
    compile: bool = False
    """Whether to compile the update with torch.compile, which takes a minute at the start."""
    batch_size: Annotated[Count, At("learn.batch_size")] = 64
    """Rows per update."""
    n_sample: Annotated[Count | None, At("collect.n_sample")] = None
    """Env steps to collect at a time."""
    n_episode: Annotated[Count | None, At("collect.n_episode")] = None
    """Episodes to collect at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not (self.compile and self.multi_gpu),
            "compile",
            "False with multi_gpu, because ranks exchange gradients within the update",
        )


class DiscountedSettings(PolicySettings):
    """Settings of policies that learn returns."""

    discount: Annotated[Fraction, At("discount_factor")] = 0.99
    """γ, the discount of future rewards."""


class OffPolicySettings(PolicySettings):
    """Settings of policies that learn from stored rows, update by update."""

    update_per_collect: Annotated[Count, At("learn.update_per_collect")] = 1
    """Updates after each collection."""


class OnPolicySettings(DiscountedSettings, section="learn"):
    """Settings of policies that learn from each collected batch once."""

    epoch_per_collect: Count = 1
    """Passes over each collected batch."""
    value_weight: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_weight: Annotated[float | Schedule, Scheduled(NonNegative)] = 0.01
    """Weight of the entropy bonus."""
    grad_clip_norm: Positive | None = 0.5
    """Largest norm of the gradient; None does not clip."""


class ActorSettings(PolicySettings):
    """Settings of policies whose actors return a distribution, or a bounded action."""

    action_low: Numbers | None = None
    """Lower bounds of a Box of actions; None uses the environment's."""
    action_high: Numbers | None = None
    """Upper bounds of a Box of actions; None uses the environment's."""
    action_bounding: Literal["rescale", "clip", "tanh"] = "rescale"
    """How to keep actions within the bounds: by mapping [-1, 1] to them, by clipping, or by mapping
    the tanh of a Gaussian to them."""


class ObsNormSettings(PolicySettings):
    """Settings of policies that can normalize observations."""

    obs_norm: bool = False
    """Whether to normalize observations by running statistics."""
    norm_clip: Positive | None = 10.0
    """Largest absolute value of normalized observations; None does not clip."""


class DatasetNormSettings(ObsNormSettings):
    """Settings of policies that normalize observations by the statistics of a dataset."""

    obs_norm = True
    """Whether to normalize observations with the mean and standard deviation of the dataset, which
    observe() takes."""
    norm_clip = None


class TDSettings(ObsNormSettings, DiscountedSettings, OffPolicySettings):
    """Settings of policies that learn from temporal differences."""

    priority: bool = False
    """Whether to return the TD errors as priorities."""
    importance_weights: Annotated[bool, At("priority_IS_weight")] = True
    """Whether the importance weights of a batch weigh the loss."""
    n_step: Annotated[Count, At("nstep")] = 1
    """Number of rewards in an n-step target."""


class QLearningSettings(TDSettings, section="learn"):
    """What the variants of Q-learning have."""

    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    double: bool = True
    """Double Q-learning: the online network chooses the target's action."""
    target_update_freq: Count = 500
    """Updates between target updates."""
    target_tau: Tau = 1.0
    """Fraction of the way that a target update moves; 1 copies the weights."""
    grad_clip_norm: Positive | None = None
    """Largest norm of the gradient; None does not clip."""
    eps: Annotated[float | Schedule, Scheduled(Fraction), At("other.eps")] = Schedule.linear(
        1.0, 0.05, decay=10_000
    )
    """ε of the actions that explore while collecting."""
    random_collect_size: Annotated[Whole, At("random_collect_size")] = 0
    """Env steps with random actions before learning."""


class DQNSettings(QLearningSettings, section="learn"):
    """The settings of DQN."""

    loss: Literal["huber", "mse"] = "huber"
    """Loss function of the TD error."""


class C51Settings(QLearningSettings):
    """The settings of C51."""


class QRDQNSettings(QLearningSettings):
    """The settings of QR-DQN."""


class QMIXSettings(QLearningSettings):
    """The settings of QMIX."""


class VDNSettings(QLearningSettings):
    """The settings of VDN."""


class RainbowSettings(QLearningSettings):
    """The settings of Rainbow."""

    priority = True
    n_step = 3
    batch_size = 32
    learning_rate = 6.25e-5
    adam_eps = 1.5e-4
    target_update_freq = 2000
    eps = 0.0


class IQNSettings(QLearningSettings, section="learn"):
    """The settings of IQN."""

    n_tau: Count = 8
    """N, the number of fractions of the online network."""
    n_tau_target: Count = 8
    """N', the number of fractions of the target network."""


class R2D2Settings(QLearningSettings, section="learn"):
    """The settings of R2D2."""

    discount = 0.997
    n_step = 5
    batch_size = 64
    """Sequences per update."""
    learning_rate = 1e-4
    adam_eps = 1e-3
    target_update_freq = 2500
    value_rescaling: bool = True
    """Whether to learn values on the scale of rescale_value."""
    priority_eta: Fraction = 0.9
    """Weight of a sequence's largest error in its priority."""
    burn_in: Annotated[Whole, At("burn_in")] = 0
    """Rows at the start of a sequence that only update the state."""


class SACSettings(ActorSettings, TDSettings, section="learn"):
    """The settings of SAC."""

    batch_size = 256
    action_bounding: Literal["tanh"] = "tanh"
    """Actions are the tanh of what the actor returns, mapped to the bounds."""
    learning_rate_q: LearningRate = 3e-4
    """Learning rate of the critics."""
    learning_rate_policy: LearningRate = 3e-4
    """Learning rate of the actor."""
    learning_rate_alpha: LearningRate = 3e-4
    """Learning rate of the temperature."""
    alpha: Positive = 1.0
    """The temperature, or the first one if it is tuned."""
    auto_alpha: bool = True
    """Whether to tune the temperature."""
    target_entropy: Number | None = None
    """Entropy to aim at; None: minus the number of dimensions."""
    target_tau: Fraction = 0.005
    """How far the target critics move in an update."""


class TQCSettings(SACSettings, section="learn"):
    """The settings of TQC."""

    n_dropped_quantiles: Whole = 2
    """Quantiles that the target leaves out, the largest ones, for each critic."""


class CQLSettings(DatasetNormSettings, SACSettings, section="learn"):
    """The settings of CQL."""

    obs_norm = False
    learning_rate_policy = 1e-4
    cql_alpha: Positive = 5.0
    """The α of the paper: weight of the penalty, or the first one."""
    lagrange_gap: Number | None = None
    """The τ of the paper: the gap that the tuned weight aims at; None: a fixed weight."""
    learning_rate_lagrange: LearningRate = 3e-4
    """Adam's learning rate for the tuned weight."""
    n_actions: Count = 10
    """Actions of each of the three kinds from which the integral is estimated."""


class DiscreteSACSettings(TDSettings, section="learn"):
    """The settings of SAC for discrete actions."""

    learning_rate_q: LearningRate = 3e-4
    """Adam's learning rate for the critics."""
    learning_rate_policy: LearningRate = 3e-4
    """Adam's learning rate for the actor."""
    learning_rate_alpha: LearningRate = 3e-4
    """Adam's learning rate for the temperature."""
    alpha: Positive = 1.0
    """The temperature, or the first one if it is tuned."""
    auto_alpha: bool = True
    """Whether to tune the temperature."""
    target_entropy_ratio: Fraction = 0.98
    """Entropy that the temperature aims at, as a fraction of the largest possible one."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target critics move per update."""


class DDPGSettings(ActorSettings, TDSettings, section="learn"):
    """The settings of DDPG."""

    batch_size = 256
    action_bounding: Literal["tanh"] = "tanh"
    """Actions are the tanh of what the actor returns, mapped to the bounds."""
    learning_rate_critic: LearningRate = 1e-3
    """Adam's learning rate for the critics."""
    learning_rate_actor: LearningRate = 1e-3
    """Adam's learning rate for the actor."""
    actor_update_freq: Count = 1
    """Updates of the critics for each of the actor and the target networks."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target networks move."""
    target_noise: NonNegative = 0.0
    """Standard deviation of the noise on the actions of targets."""
    target_noise_clip: Positive = 0.5
    """Largest noise on the actions of targets."""
    noise: Annotated[Literal["gaussian", "ou"], At("collect.noise")] = "gaussian"
    """Noise on collected actions: independent, or an Ornstein-Uhlenbeck process."""
    noise_sigma: Annotated[NonNegative, At("collect.noise_sigma")] = 0.1
    """Standard deviation of the normal draws that make this noise."""
    noise_theta: Annotated[Fraction, At("collect.noise_theta")] = 0.15
    """Fraction of the Ornstein-Uhlenbeck noise that is lost in a step."""


class TD3Settings(DDPGSettings):
    """The settings of TD3."""

    actor_update_freq = 2
    target_noise = 0.2


class TD3BCSettings(DatasetNormSettings, TD3Settings, section="learn"):
    """The settings of TD3+BC."""

    learning_rate_critic = 3e-4
    learning_rate_actor = 3e-4
    bc_alpha: Positive = 2.5
    """The α of the paper: the weight of the values next to cloning."""


class IQLSettings(ActorSettings, DiscountedSettings, OffPolicySettings, section="learn"):
    """The settings of IQL."""

    batch_size = 256
    action_bounding: Literal["rescale"] = "rescale"
    """The mean of the actor is bounded already, and is mapped to the bounds."""
    learning_rate_actor: LearningRate = 3e-4
    """Adam's learning rate for the actor."""
    learning_rate_critic: LearningRate = 3e-4
    """Adam's learning rate for the critics."""
    learning_rate_value: LearningRate = 3e-4
    """Adam's learning rate for the state value."""
    expectile: Annotated[float, Gt(0), Lt(1)] = 0.7
    """τ, the expectile of the state value: 0.5 is the mean, 1 the best."""
    inverse_temperature: NonNegative = 3.0
    """β, how strongly advantages count in cloning; 0 clones all alike."""
    max_advantage_weight: Positive = 100.0
    """Largest weight of an action that is cloned."""
    target_tau: Fraction = 0.005
    """Fraction of the way that the target critics move per update."""


class BCSettings(ActorSettings, OffPolicySettings, section="learn"):
    """The settings of behavioral cloning."""

    batch_size = 256
    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""
    adam_eps: Positive = 1e-8
    """Adam's ε."""
    label_smoothing: Fraction = 0.0
    """Weight of the uniform distribution in discrete targets."""
    grad_clip_norm: Positive | None = None
    """Largest norm of the gradient; None does not clip."""


class DecisionTransformerSettings(
    ActorSettings, DatasetNormSettings, OffPolicySettings, section="learn"
):
    """The settings of the decision transformer."""

    batch_size = 64
    """Sequences per update."""
    action_bounding: Literal["rescale"] = "rescale"
    """The actions of the network are bounded already, and are mapped to the bounds."""
    target_return: Annotated[Number | None, At("target_return")] = None
    """Return to ask for when acting; None: the largest of an episode in the data."""
    return_scale: Annotated[Positive, At("return_scale")] = 1000.0
    """Returns are divided by it before the network sees them."""
    learning_rate: LearningRate = 1e-4
    """Adam's learning rate."""
    grad_clip_norm: Positive | None = 0.25
    """Largest norm of the gradient; None does not clip."""


class AdvantageSettings(ObsNormSettings, ActorSettings, OnPolicySettings):
    """Settings of policies that learn from advantages."""

    norm_clip = 10.0
    """Largest absolute value of normalized observations and rewards; None does not clip."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    reward_norm: bool = False
    """Whether to divide rewards by the running standard deviation of returns."""
    value_norm: bool = False
    """Whether the critic learns returns normalized by running statistics."""
    adv_norm: Annotated[bool, At("learn.adv_norm")] = True
    """Whether to normalize advantages in each minibatch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not (self.multi_gpu and (self.reward_norm or self.value_norm)),
            "multi_gpu",
            "False with reward_norm or value_norm, since the ranks would have different statistics",
        )


class PPOSettings(AdvantageSettings, section="learn"):
    """The settings of PPO."""

    batch_size = 64
    """Rows per minibatch."""
    epoch_per_collect = 10
    learning_rate: LearningRate = 3e-4
    """Adam's learning rate."""
    adam_eps: Positive = 1e-5
    """Adam's ε."""
    clip_ratio: Annotated[float | Schedule, Scheduled(Positive)] = 0.2
    """ε of the clipped objective."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """Factor of dual clipping; None disables it."""
    value_clip: Positive | None = None
    """Range of the clipped value loss; None does not clip."""
    entropy_weight = 0.0
    recompute_advantage: bool = False
    """Whether every epoch starts with new values and advantages."""
    target_kl: Annotated[Positive | None, At("target_kl")] = None
    """KL divergence at which learning stops early; None never stops; Spinning Up and
    stable-baselines3 stop at 1.5 times theirs."""


class RecurrentPPOSettings(PPOSettings):
    """The settings of PPO with a recurrent network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not self.recompute_advantage,
            "recompute_advantage",
            "False for a recurrent policy, which would have to run all lanes again",
        )


class MAPPOSettings(PPOSettings):
    """The settings of MAPPO and IPPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not self.reward_norm, "reward_norm", "False with several agents; use value_norm"
        )


class PolicyGradientSettings(OnPolicySettings, section="learn"):
    """What A2C and IMPALA have."""

    optimizer: Literal["rmsprop", "adam", "adamw"] = "rmsprop"
    """What makes the steps."""
    optimizer_eps: Positive = 1e-5
    """The optimizer's ε."""
    rmsprop_decay: Fraction = 0.99
    """Decay of RMSprop's mean of squared gradients."""
    weight_decay: NonNegative = 0.01
    """AdamW's decay of the weights."""
    learning_rate: LearningRate = 7e-4
    """The optimizer's learning rate."""


class A2CSettings(PolicyGradientSettings, AdvantageSettings):
    """The settings of A2C."""

    batch_size = 40
    """Rows per update; set it to the rows of a collected batch."""
    gae_lambda = 1.0
    adv_norm = False
    """Whether to normalize advantages in each batch."""


class IMPALASettings(ActorSettings, PolicyGradientSettings, section="learn"):
    """The settings of IMPALA."""

    batch_size = 640
    """Least rows per update, in whole lanes."""
    learning_rate = 6e-4
    trace_decay: Fraction = 1.0
    """λ of V-trace (remark 2)."""
    rho_clip: Positive = 1.0
    """Bound of the ratios ρ, also of the advantages'."""
    c_clip: Positive = 1.0
    """Bound of the ratios c, at most that of ρ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.c_clip <= self.rho_clip, "c_clip", f"at most rho_clip, which is {self.rho_clip}"
        )


SETTINGS: dict[str, type[PolicySettings]] = {
    "a2c": A2CSettings,
    "bc": BCSettings,
    "c51": C51Settings,
    "cql": CQLSettings,
    "ddpg": DDPGSettings,
    "decision_transformer": DecisionTransformerSettings,
    "discrete_sac": DiscreteSACSettings,
    "dqn": DQNSettings,
    "impala": IMPALASettings,
    "ippo": MAPPOSettings,
    "iql": IQLSettings,
    "iqn": IQNSettings,
    "mappo": MAPPOSettings,
    "ppo": PPOSettings,
    "ppo_recurrent": RecurrentPPOSettings,
    "qmix": QMIXSettings,
    "qrdqn": QRDQNSettings,
    "r2d2": R2D2Settings,
    "rainbow": RainbowSettings,
    "sac": SACSettings,
    "td3": TD3Settings,
    "td3_bc": TD3BCSettings,
    "tqc": TQCSettings,
    "vdn": VDNSettings,
}
