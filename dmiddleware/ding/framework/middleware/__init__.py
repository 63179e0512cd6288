"""The face of ``ding.framework.middleware``: the stock middleware, with DI-engine's arguments.

Each function takes what DI-engine's takes, the whole config first, and returns the middleware of
:mod:`middleware` with the settings that it names.
"""

from dmiddleware.ding.framework.middleware.collecting import (
    EpisodeCollector,
    StepCollector,
    eps_greedy_handler,
    eps_greedy_masker,
    interaction_evaluator,
    interaction_evaluator_ttorch,
)
from dmiddleware.ding.framework.middleware.exchanging import (
    ContextExchanger,
    ModelExchanger,
    PeriodicalModelExchanger,
)
from dmiddleware.ding.framework.middleware.learning import (
    HERLearner,
    OffPolicyLearner,
    buffer_saver,
    data_pusher,
    gae_estimator,
    her_data_enhancer,
    montecarlo_return_estimator,
    multistep_trainer,
    nstep_reward_enhancer,
    offline_data_fetcher,
    offline_data_saver,
    offpolicy_data_fetcher,
    priority_calculator,
    reward_estimator,
    sqil_data_pusher,
    trainer,
)
from dmiddleware.ding.framework.middleware.recording import (
    CkptSaver,
    ddp_termination_checker,
    epoch_timer,
    final_ctx_saver,
    offline_logger,
    online_logger,
    termination_checker,
    wandb_offline_logger,
    wandb_online_logger,
)
from dmiddleware.ding.framework.middleware.transitions import (
    TransitionList,
    inferencer,
    rolloutor,
)

offline_data_fetcher_from_mem = offline_data_fetcher

__all__ = [
    "CkptSaver",
    "ContextExchanger",
    "EpisodeCollector",
    "HERLearner",
    "ModelExchanger",
    "OffPolicyLearner",
    "PeriodicalModelExchanger",
    "StepCollector",
    "TransitionList",
    "buffer_saver",
    "data_pusher",
    "ddp_termination_checker",
    "epoch_timer",
    "eps_greedy_handler",
    "eps_greedy_masker",
    "final_ctx_saver",
    "gae_estimator",
    "her_data_enhancer",
    "inferencer",
    "interaction_evaluator",
    "interaction_evaluator_ttorch",
    "montecarlo_return_estimator",
    "multistep_trainer",
    "nstep_reward_enhancer",
    "offline_data_fetcher",
    "offline_data_fetcher_from_mem",
    "offline_data_saver",
    "offline_logger",
    "offpolicy_data_fetcher",
    "online_logger",
    "priority_calculator",
    "reward_estimator",
    "rolloutor",
    "sqil_data_pusher",
    "termination_checker",
    "trainer",
    "wandb_offline_logger",
    "wandb_online_logger",
]

REFUSED = {
    "PPOFStepCollector": "it serves PPOF alone; use StepCollector with PPOPolicy",
    "ppof_adv_estimator": "it serves PPOF alone; use gae_estimator with PPOPolicy",
    "OfflineMemoryDataFetcher": "use offline_data_fetcher; a dataset is in memory here",
    "Barrier": "use middleware.Barrier",
    "BarrierRuntime": "use middleware.Barrier",
    "qgpo_support_data_generator": "QGPO is not here; use CQLPolicy or IQL",
    "qgpo_offline_data_fetcher": "QGPO is not here; use CQLPolicy or IQL",
}
