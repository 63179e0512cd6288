"""Stock middleware: each fits one piece of the learning floor into a chain, one file a kind.

Observers (loggers, the progress bar, the learning curve, ``CkptSaver``) work on the way back of a
step, so their place in the chain does not matter; the others stand in the order in which the work
is done: exchange, explore, collect, push, learn, evaluate.
"""

from middleware.advantage import gae_estimator, montecarlo_return_estimator, nstep_reward_enhancer
from middleware.barrier import Barrier
from middleware.checkpoint import CkptSaver
from middleware.collect import EpisodeCollector, StepCollector
from middleware.evaluate import interaction_evaluator
from middleware.exchange import ContextExchanger, ModelExchanger, PeriodicalModelExchanger
from middleware.explore import eps_greedy_handler
from middleware.final import final_ctx_saver
from middleware.learn import OffPolicyLearner, OnPolicyLearner, multistep_trainer, trainer
from middleware.learning_curve import learning_curve
from middleware.log import offline_logger, online_logger
from middleware.offline_data import offline_data_fetcher, offline_data_saver
from middleware.profile import epoch_timer
from middleware.progress_bar import progress_bar
from middleware.replay_buffer import data_pusher, offpolicy_data_fetcher, priority_calculator
from middleware.run_folder import RunFolder
from middleware.snapshot import SnapshotSaver
from middleware.stop import termination_checker

__all__ = [
    "ContextExchanger",
    "ModelExchanger",
    "PeriodicalModelExchanger",
    "Barrier",
    "eps_greedy_handler",
    "StepCollector",
    "EpisodeCollector",
    "data_pusher",
    "priority_calculator",
    "nstep_reward_enhancer",
    "gae_estimator",
    "montecarlo_return_estimator",
    "offpolicy_data_fetcher",
    "offline_data_fetcher",
    "offline_data_saver",
    "OffPolicyLearner",
    "OnPolicyLearner",
    "trainer",
    "multistep_trainer",
    "interaction_evaluator",
    "CkptSaver",
    "SnapshotSaver",
    "online_logger",
    "offline_logger",
    "termination_checker",
    "epoch_timer",
    "progress_bar",
    "learning_curve",
    "final_ctx_saver",
    "RunFolder",
]
