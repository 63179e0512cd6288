"""Two buffers of the same data, as the configs of DI-engine's PPG have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.classic import PolicyAndValueBuffer, create_buffer
from dmiddleware.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(seed: int = 0, value: Any = None, **options: Any) -> Any:
    value = {"replay_buffer_size": 50} if value is None else value
    cfg = {"type": "policy_and_value", "seed": seed, "value": value, "log_to_file": False}
    return create_buffer({**cfg, "replay_buffer_size": 10, **options})


def rows(n: int) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor(float(at)) for name in ("obs", "ret", "adv")} for at in range(n)]


def test_values_learn_from_more_rows_than_the_policy() -> None:
    buffer = made()
    assert isinstance(buffer, PolicyAndValueBuffer)
    buffer.push(rows(50), 0)
    drawn = [item for _ in range(20) for item in buffer.sample(10, 0)]
    assert all(item["adv"] >= 40 for item in drawn)
    assert {tuple(item["valued_rows"]) for item in drawn} == {("obs", "ret")}
    valued = [float(item["valued_rows"]["ret"]) for item in drawn]
    assert min(valued) < 40 <= max(valued)


def test_an_item_leaves_each_buffer_when_it_has_been_used_often_enough() -> None:
    buffer = made(max_use=1, value={"max_use": 2, "replay_buffer_size": 4})
    buffer.push(rows(4), 0)
    assert len(buffer.sample(4, 0)) == 4
    assert buffer.sample(4, 0) is None  # the policy has used all
    buffer.push(rows(4), 0)
    assert len(buffer.sample(4, 0)) == 4


def test_nothing_is_drawn_while_one_buffer_has_too_few_rows() -> None:
    buffer = made(replay_buffer_size=3)
    buffer.push(rows(8), 0)
    assert buffer.sample(4, 0) is None
    assert len(buffer.sample(3, 0)) == 3
    buffer.clear()
    assert buffer.sample(1, 0) is None


def test_a_restored_buffer_draws_the_same_rows() -> None:
    buffer, restored = made(), made(seed=1)
    buffer.push(rows(30), 0)
    buffer.sample(8, 0)
    restored.load_state_dict(buffer.state_dict())
    draws = [[float(i["valued_rows"]["ret"]) for i in b.sample(8, 0)] for b in (buffer, restored)]
    assert draws[0] == draws[1]


def test_options_of_the_buffer_of_values_are_checked() -> None:
    with pytest.raises(ConfigError, match="replay_buffer_size"):
        made(value={"replay_bufer_size": 5})
