"""Stock middleware, and the contexts and roles of reinforcement learning.

The middleware collect, explore, learn, evaluate, record and exchange data in a chain.

Observers (:class:`Experiment` and its parts) work on the way back of a step, so their position in
the chain does not matter. Use the others in the order of the work: exchange, explore, collect,
push, learn, evaluate.
"""

from middleware.advantage import (
    GAEEstimator,
    MonteCarloReturnEstimator,
    NStepRewardEnhancer,
    gae_estimator,
    montecarlo_return_estimator,
    nstep_reward_enhancer,
)
from middleware.barrier import Barrier
from middleware.base import BaseMiddleware
from middleware.checkpoint import CkptSaver
from middleware.collect import EpisodeCollector, StepCollector
from middleware.context import OfflineRLContext, OnlineRLContext, RLContext
from middleware.evaluate import InteractionEvaluator, interaction_evaluator
from middleware.exchange import ContextExchanger, ModelExchanger, PeriodicalModelExchanger
from middleware.experiment import Experiment, ExperimentResult, FinalCtxSaver, final_ctx_saver
from middleware.explore import EpsGreedyHandler, eps_greedy_handler
from middleware.learn import OfflineLearner, OffPolicyLearner, OnPolicyLearner
from middleware.learning_curve import LearningCurve
from middleware.log import OfflineLogger, OnlineLogger, offline_logger, online_logger
from middleware.offline_data import OfflineDataSaver, offline_data_saver
from middleware.profile import EpochTimer, epoch_timer
from middleware.progress_bar import ProgressBar
from middleware.replay_buffer import (
    DataPusher,
    PriorityCalculator,
    data_pusher,
    priority_calculator,
)
from middleware.reward import IntrinsicAdvantage, RewardLearner
from middleware.roles import Role
from middleware.run_folder import RunFolder
from middleware.self_play import SelfPlay
from middleware.snapshot import SnapshotSaver
from middleware.stop import TerminationChecker, termination_checker
from middleware.wandb_logger import WandbLogger

__all__ = [
    "OnlineRLContext",
    "OfflineRLContext",
    "RLContext",
    "Role",
    "BaseMiddleware",
    "ContextExchanger",
    "ModelExchanger",
    "PeriodicalModelExchanger",
    "Barrier",
    "EpsGreedyHandler",
    "eps_greedy_handler",
    "SelfPlay",
    "StepCollector",
    "EpisodeCollector",
    "data_pusher",
    "DataPusher",
    "priority_calculator",
    "PriorityCalculator",
    "nstep_reward_enhancer",
    "NStepRewardEnhancer",
    "gae_estimator",
    "GAEEstimator",
    "montecarlo_return_estimator",
    "MonteCarloReturnEstimator",
    "RewardLearner",
    "IntrinsicAdvantage",
    "offline_data_saver",
    "OfflineDataSaver",
    "OffPolicyLearner",
    "OnPolicyLearner",
    "OfflineLearner",
    "interaction_evaluator",
    "InteractionEvaluator",
    "Experiment",
    "ExperimentResult",
    "CkptSaver",
    "SnapshotSaver",
    "online_logger",
    "OnlineLogger",
    "offline_logger",
    "OfflineLogger",
    "termination_checker",
    "TerminationChecker",
    "epoch_timer",
    "EpochTimer",
    "ProgressBar",
    "LearningCurve",
    "WandbLogger",
    "final_ctx_saver",
    "FinalCtxSaver",
    "RunFolder",
]
