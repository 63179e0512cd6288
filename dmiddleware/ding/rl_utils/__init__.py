"""The face of ``ding.rl_utils``: losses, returns and exploration, on ``dmiddleware.rl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.ding.rl_utils.adder import *  # noqa: F403
from dmiddleware.ding.rl_utils.distributional_errors import *  # noqa: F403
from dmiddleware.ding.rl_utils.exploration import *  # noqa: F403
from dmiddleware.ding.rl_utils.policy_errors import *  # noqa: F403
from dmiddleware.ding.rl_utils.returns import *  # noqa: F403
from dmiddleware.ding.rl_utils.td_errors import *  # noqa: F403

_ACER: Final = "the algorithm ACER is not here; use impala, whose targets are V-trace"
_LANGUAGE: Final = "losses for language models are not here; use trl, verl or OpenRLHF"

REFUSED: Final[Mapping[str, str]] = {
    "acer_policy_error": _ACER,
    "acer_value_error": _ACER,
    "acer_trust_region_update": _ACER,
    "grpo_policy_data": _LANGUAGE,
    "grpo_policy_error": _LANGUAGE,
    "grpo_info": _LANGUAGE,
    "rloo_policy_data": _LANGUAGE,
    "rloo_policy_error": _LANGUAGE,
    "rloo_info": _LANGUAGE,
    "efficient_method": _LANGUAGE,
    "naive_method": _LANGUAGE,
    "less_efficient_method": _LANGUAGE,
    "LogProbFunction": _LANGUAGE,
    "vtrace_nstep_return": "use dmiddleware.rl.vtrace(...).value",
    "vtrace_advantage": "use dmiddleware.rl.vtrace(...).adv",
}
