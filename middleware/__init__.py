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
)
from middleware.barrier import Barrier, BarrierSettings
from middleware.base import BaseMiddleware
from middleware.collect import (
    EpisodeCollector,
    EpisodeCollectorSettings,
    StepCollector,
    StepCollectorSettings,
)
from middleware.collect_teams import TeamCollector, TeamCollectorSettings
from middleware.context import OfflineRLContext, OnlineRLContext, RLContext
from middleware.curriculum import Curriculum, CurriculumSettings
from middleware.di_engine_names import (
    data_pusher,
    epoch_timer,
    eps_greedy_handler,
    final_ctx_saver,
    gae_estimator,
    interaction_evaluator,
    montecarlo_return_estimator,
    nstep_reward_enhancer,
    offline_data_saver,
    offline_logger,
    online_logger,
    priority_calculator,
    termination_checker,
)
from middleware.distill import labeled_by
from middleware.eps_greedy import EpsGreedyHandler
from middleware.evaluate import (
    InteractionEvaluator,
    InteractionEvaluatorSettings,
)
from middleware.exchange import (
    ContextExchanger,
    ContextExchangerSettings,
    ModelExchanger,
    ModelExchangerSettings,
    PeriodicalModelExchanger,
    PeriodicalModelExchangerSettings,
)
from middleware.learn import (
    OfflineLearner,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    OnPolicyLearner,
)
from middleware.profile import EpochTimer, EpochTimerSettings
from middleware.record.checkpoint import CkptSaver, CkptSaverSettings
from middleware.record.experiment import (
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    FinalCtxSaver,
)
from middleware.record.learning_curve import LearningCurve, LearningCurveSettings
from middleware.record.log import (
    MetricsLogger,
    MetricsLoggerSettings,
)
from middleware.record.offline_data import OfflineDataSaver, OfflineDataSaverSettings
from middleware.record.progress_bar import ProgressBar, ProgressBarSettings
from middleware.record.run_folder import RunFolder
from middleware.record.snapshot import SnapshotSaver, SnapshotSaverSettings
from middleware.record.trackio_logger import TrackioLogger, TrackioLoggerSettings
from middleware.record.wandb_logger import WandbLogger, WandbLoggerSettings
from middleware.replay_buffer import (
    DataPusher,
    DataPusherSettings,
    PriorityCalculator,
)
from middleware.reward import (
    IntrinsicAdvantage,
    IntrinsicAdvantageSettings,
    RewardLearner,
    RewardLearnerSettings,
)
from middleware.roles import Role
from middleware.self_play import SelfPlay, SelfPlaySettings
from middleware.termination import TerminationChecker, TerminationCheckerSettings

__all__ = [
    "OnlineRLContext",
    "OfflineRLContext",
    "RLContext",
    "Role",
    "BaseMiddleware",
    "ContextExchanger",
    "ContextExchangerSettings",
    "ModelExchanger",
    "ModelExchangerSettings",
    "PeriodicalModelExchanger",
    "PeriodicalModelExchangerSettings",
    "Barrier",
    "BarrierSettings",
    "EpsGreedyHandler",
    "eps_greedy_handler",
    "SelfPlay",
    "SelfPlaySettings",
    "Curriculum",
    "CurriculumSettings",
    "StepCollector",
    "StepCollectorSettings",
    "labeled_by",
    "TeamCollector",
    "TeamCollectorSettings",
    "EpisodeCollector",
    "EpisodeCollectorSettings",
    "data_pusher",
    "DataPusher",
    "DataPusherSettings",
    "priority_calculator",
    "PriorityCalculator",
    "nstep_reward_enhancer",
    "NStepRewardEnhancer",
    "gae_estimator",
    "GAEEstimator",
    "montecarlo_return_estimator",
    "MonteCarloReturnEstimator",
    "RewardLearner",
    "RewardLearnerSettings",
    "IntrinsicAdvantage",
    "IntrinsicAdvantageSettings",
    "offline_data_saver",
    "OfflineDataSaver",
    "OfflineDataSaverSettings",
    "OffPolicyLearner",
    "OffPolicyLearnerSettings",
    "OnPolicyLearner",
    "OfflineLearner",
    "interaction_evaluator",
    "InteractionEvaluator",
    "InteractionEvaluatorSettings",
    "Experiment",
    "ExperimentSettings",
    "ExperimentResult",
    "CkptSaver",
    "CkptSaverSettings",
    "SnapshotSaver",
    "SnapshotSaverSettings",
    "MetricsLogger",
    "MetricsLoggerSettings",
    "online_logger",
    "offline_logger",
    "termination_checker",
    "TerminationChecker",
    "TerminationCheckerSettings",
    "epoch_timer",
    "EpochTimer",
    "EpochTimerSettings",
    "ProgressBar",
    "ProgressBarSettings",
    "LearningCurve",
    "LearningCurveSettings",
    "WandbLogger",
    "WandbLoggerSettings",
    "TrackioLogger",
    "TrackioLoggerSettings",
    "final_ctx_saver",
    "FinalCtxSaver",
    "RunFolder",
]
