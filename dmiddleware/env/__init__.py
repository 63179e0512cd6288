"""Env managers: step several Gymnasium envs as one, with true final observations."""

from dmiddleware.env.async_manager import AsyncEnvManager
from dmiddleware.env.atari import atari_preprocessing
from dmiddleware.env.envpool_manager import EnvPoolManager
from dmiddleware.env.factory import EnvSettings, make_env, make_env_manager
from dmiddleware.env.game_env import GameEnv
from dmiddleware.env.games import BattleEnv
from dmiddleware.env.jax_env import JaxEnv
from dmiddleware.env.manager import BaseEnvManager, check_env_manager
from dmiddleware.env.opponent_env import OpponentEnv, Opponents
from dmiddleware.env.pettingzoo import ParallelEnvAdapter, PettingZooAdapter
from dmiddleware.env.prepared import make_atari_env, make_grid_env
from dmiddleware.env.simulator import SimulatorEnv
from dmiddleware.env.sync_manager import SyncEnvManager
from dmiddleware.env.team import AgentSpaces, agent_spaces, n_agent_of, team_spaces
from dmiddleware.env.timestep import BatchedTimestep, EnvTimestep, StepInfo
from dmiddleware.env.vector_manager import VectorEnvManager

__all__ = [
    "EnvSettings",
    "make_env",
    "make_env_manager",
    "BaseEnvManager",
    "SyncEnvManager",
    "AsyncEnvManager",
    "JaxEnv",
    "SimulatorEnv",
    "VectorEnvManager",
    "EnvPoolManager",
    "atari_preprocessing",
    "make_atari_env",
    "make_grid_env",
    "BatchedTimestep",
    "EnvTimestep",
    "StepInfo",
    "check_env_manager",
    "BattleEnv",
    "PettingZooAdapter",
    "ParallelEnvAdapter",
    "GameEnv",
    "OpponentEnv",
    "Opponents",
    "AgentSpaces",
    "team_spaces",
    "agent_spaces",
    "n_agent_of",
]
