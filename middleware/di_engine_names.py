"""The names that DI-engine gave to middleware of this package."""

from middleware.advantage import GAEEstimator, MonteCarloReturnEstimator, NStepRewardEnhancer
from middleware.eps_greedy import EpsGreedyHandler
from middleware.evaluate import InteractionEvaluator
from middleware.profile import EpochTimer
from middleware.record.experiment import FinalCtxSaver
from middleware.record.log import MetricsLogger
from middleware.record.offline_data import OfflineDataSaver
from middleware.replay_buffer import DataPusher, PriorityCalculator
from middleware.termination import TerminationChecker

__all__ = [
    "data_pusher",
    "epoch_timer",
    "eps_greedy_handler",
    "final_ctx_saver",
    "gae_estimator",
    "interaction_evaluator",
    "montecarlo_return_estimator",
    "nstep_reward_enhancer",
    "offline_data_saver",
    "offline_logger",
    "online_logger",
    "priority_calculator",
    "termination_checker",
]

data_pusher = DataPusher
epoch_timer = EpochTimer
eps_greedy_handler = EpsGreedyHandler
final_ctx_saver = FinalCtxSaver
gae_estimator = GAEEstimator
interaction_evaluator = InteractionEvaluator
montecarlo_return_estimator = MonteCarloReturnEstimator
nstep_reward_enhancer = NStepRewardEnhancer
offline_data_saver = OfflineDataSaver
offline_logger = MetricsLogger
online_logger = MetricsLogger
priority_calculator = PriorityCalculator
termination_checker = TerminationChecker
