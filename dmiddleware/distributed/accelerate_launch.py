"""Settings of ``accelerate launch``, which reach a program as environment variables."""

from __future__ import annotations

import os
from typing import Final

from dmiddleware.errors import ConfigError

__all__ = ["check_accelerate_launch"]

_OPTIONS: Final = {
    "ACCELERATE_MIXED_PRECISION": "--mixed_precision",
    "ACCELERATE_DYNAMO_BACKEND": "--dynamo_backend",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
}
_OFF: Final = ("", "no", "false")


def check_accelerate_launch() -> None:
    """Refuse settings of ``accelerate launch`` that would silently have no effect.

    Raises:
        ConfigError: naming the option, or saying that ``accelerate`` has not started all ranks.
    """
    for variable, option in _OPTIONS.items():
        value = os.environ.get(variable, "")
        if value.lower() not in _OFF:
            raise ConfigError(
                f"accelerate launch {option} has set {variable}={value}, which data_parallel() "
                "cannot do: the policy owns its model and its updates; leave the option out, also "
                "in the config of accelerate"
            )
    # Without --multi_gpu, accelerate passes the address of rank 0, but starts one process only.
    is_meant_for_more = "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ
    if is_meant_for_more and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "accelerate launch was given several processes, but without --multi_gpu it does not "
            "start them as ranks, so this process would learn alone; start the program with "
            "torchrun --nproc-per-node, or use --multi_gpu, which works on CPUs too"
        )
