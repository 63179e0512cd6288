"""The command ``ditask classic``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from dmiddleware.classic.logs import output_folder
from dmiddleware.errors import ConfigError, DMiddlewareError
from dmiddleware.worker.config_file import read_config_with_system
from dmiddleware.worker.entry import NO_LIMIT, serial_run
from dmiddleware.worker.imitation import dqfd_run, gail_run, sqil_run
from dmiddleware.worker.offline_entry import names_data, offline_run
from dmiddleware.worker.parallel_run import classic_run

__all__ = ["checked_mode", "classic_command", "run_config"]

_DIRECT: Final = "serial_reward_model_onpolicy"
_ONLINE: Final = (
    "serial", "serial_onpolicy", "serial_onpolicy_ppg", "serial_reward_model_offpolicy", _DIRECT,
)  # fmt: skip
_OFFLINE: Final = ("serial_offline", "serial_bc", "bc", "serial_dt")
_IMITATION: Final[Mapping[str, Any]] = {
    "serial_sqil": sqil_run, "serial_dqfd": dqfd_run, "serial_gail": gail_run,
}  # fmt: skip
_PARALLEL: Final = "parallel"
_REWARDS: Final = "learn rewards in a chain, by middleware.RewardLearner with RND, ICM or GAIL"
_NO_WORLD_MODEL: Final = "world models are not here; learn from play with -m serial"
_ELSEWHERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "serial_guided_cost", "serial_preference_based_irl",
            "serial_preference_based_irl_onpolicy", "serial_reward_model_trex",
            "serial_reward_model_trex_onpolicy", "serial_trex", "serial_trex_onpolicy",
        ),
        _REWARDS,
    ),
    "collect_demo_data": "record data in a chain, by OfflineDataSaver",
    "serial_bco": "clone recorded actions with -m bc; no model infers them from observations",
    "serial_dream": _NO_WORLD_MODEL,
    "serial_dyna": _NO_WORLD_MODEL,
    "serial_mbrl": _NO_WORLD_MODEL,
    "serial_ngu": "NGU is not here; explore in a chain, by middleware.RewardLearner with RND",
    "serial_reward_model_ngu": "NGU is not here; explore in a chain, by middleware.RewardLearner "
    "with RND",
    "serial_pc": "procedure cloning is not here; clone actions with -m bc",
    "serial_plr": "middleware.curriculum chooses levels in a chain",
    "serial_r2d3": "R2D3 is not here; learn from play with R2D2",
    "serial_td3_vae": "no autoencoder of actions is here; use TD3 with -m serial",
}  # fmt: skip
"""DI-engine's ways to learn that are not here, and what to do."""


@click.command(
    "classic",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "-c",
    "--config",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Config file: Python code that defines main_config and create_config. It is run.",
)
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The run's seed.",
)
@click.option(
    "-m",
    "--mode",
    type=click.Choice([*_ONLINE, *_OFFLINE, *_IMITATION, _PARALLEL]),
    help="How to learn: from play, from recorded data (serial_offline, bc), from an expert "
    "(serial_sqil, serial_dqfd, serial_gail), or in several processes.  [default: parallel if the "
    "file defines system_config, from data if the config names any, else from play]",
)
@click.option("--env-step", type=click.IntRange(min=1), help="Most env steps.  [default: no limit]")
@click.option("--train-iter", type=click.IntRange(min=1), help="Most updates.  [default: no limit]")
@click.option("--data", help="Recorded data, in place of data_path in the config.")
@click.option(
    "--expert",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The config file of the expert that serial_sqil, serial_dqfd and serial_gail learn from.",
)
def classic_command(
    config: Path,
    seed: int,
    mode: str | None,
    env_step: int | None,
    train_iter: int | None,
    data: str | None,
    expert: Path | None,
) -> None:
    """Run a config file of DI-engine, as ding -m serial -c FILE -s 0 does.

    Data are a file of OfflineDataSaver, an HDF5 file, or the id of a Minari dataset.

    \b
      ditask classic -c cartpole_dqn_config.py -s 0
      ditask classic -c cartpole_ppo_config.py -s 0 -m serial_onpolicy
      ditask classic -c pendulum_td3_bc_config.py -s 0 -m serial_offline
      ditask classic -c cartpole_sqil_config.py -m serial_sqil --expert cartpole_dqn_config.py
    In several processes, over HTTP or over the router:
      ditask classic -c parallel/cartpole_dqn_config.py -s 0
      ditask --roles coordinator=1,learner=1,collector=2
             classic -c parallel/cartpole_dqn_config.py -s 0
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    try:
        main, create, system = _read(config)
        if mode is None and system is not None:
            mode = _PARALLEL
        mode = checked_mode(mode, main, data)
        limit = train_iter or NO_LIMIT
        if (expert is not None) != (mode in _IMITATION):
            raise click.UsageError(
                "--expert FILE, the config of the expert, goes with -m serial_sqil, "
                "serial_dqfd or serial_gail"
            )
        if mode == _PARALLEL:
            if (env_step, train_iter, data) != (None, None, None):
                raise click.UsageError(
                    "--env-step, --train-iter and --data are for one process; a parallel run ends "
                    "at stop_value, or after learn.learner.train_iterations"
                )
            classic_run(main, system, seed, create=create)
        elif mode in _OFFLINE:
            if env_step is not None:
                raise click.UsageError("--env-step needs a mode that plays; use --train-iter")
            offline_run(main, create, seed, limit, data=data)
        elif data is not None:
            raise click.UsageError(f"--data needs -m serial_offline or bc, not {mode}")
        elif expert is not None:
            imitate, (shown, shown_create, _) = _IMITATION[mode], _read(expert)
            imitate(main, create, (shown, shown_create), seed, limit, env_step or NO_LIMIT)
        else:
            is_direct = mode == _DIRECT
            serial_run(main, create, seed, limit, env_step or NO_LIMIT, is_direct=is_direct)
    except DMiddlewareError as error:
        raise click.ClickException(str(error)) from error
    folder = output_folder(str(main.get("exp_name", "default_experiment")))
    click.echo(f"checkpoints in {folder / 'ckpt_learner'}")


def run_config(file: str = "", *, seed: int = 0) -> None:
    """Run a config file of DI-engine in one of the processes that ditask has started.

    ``ditask --roles coordinator=1,learner=1,collector=2 classic -c FILE`` calls it.

    Args:
        file: the config file, which defines main_config, create_config and system_config.
        seed: the run's seed.

    Raises:
        ConfigError: for an unusable config, or without one.
    """
    if not file:
        raise ConfigError("name a config file: ditask --roles ... classic -c FILE")
    main, create, system = _read(Path(file))
    classic_run(main, system, seed, create=create)


def _read(config: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Read a config; one that imports modules of DI-engine gets them from the door.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return read_config_with_system(config)
    except ConfigError as error:
        cause = error.__cause__
        name = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
        if name.partition(".")[0] not in ("ding", "ditk", "dizoo", "gym"):
            raise
    # By its name, because nothing else may depend on it.
    importlib.import_module("dmiddleware.ding").open_door(config.parent)
    return read_config_with_system(config)


def checked_mode(mode: str | None, main: Mapping[str, Any], data: str | None = None) -> str:
    """Return how to learn: as asked, or from data if there are any, else from play.

    Args:
        mode: a mode of DI-engine's command ``ding``; None: the config decides.
        main: the main config.
        data: data to learn from in place of those that the config names.

    Raises:
        ConfigError: if the mode is not here, saying what to use instead.
    """
    if mode is None:
        return "serial_offline" if data is not None or names_data(main) else "serial"
    modes = (*_ONLINE, *_OFFLINE, *_IMITATION, _PARALLEL)
    if mode not in modes:
        instead = _ELSEWHERE.get(mode, f"the modes are {', '.join(modes)}")
        raise ConfigError(f"the mode {mode} of DI-engine is not here; {instead}")
    return mode
