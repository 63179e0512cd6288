"""Programs that ``accelerate launch`` has started, as its version 1.15 does."""

from __future__ import annotations

import pytest

from dmiddleware.distributed import data_parallel
from dmiddleware.errors import ConfigError

DEFAULTS = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}


@pytest.fixture(autouse=True)
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in DEFAULTS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "--mixed_precision"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "--use_deepspeed"),
        ("ACCELERATE_USE_FSDP", "true", "--use_fsdp"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "--use_megatron_lm"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "--use_parallelism_config"),
    ],
)
def test_an_option_without_effect_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, option: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=option), data_parallel():
        pass


def test_processes_that_are_not_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="--multi_gpu"), data_parallel():
        pass


def test_one_process_with_the_defaults_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with data_parallel() as rank:
        assert rank == 0
