import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dmiddleware.pipeline import Task
from dmiddleware.process import torch_threads
from dmiddleware.process.torch_threads import chosen_threads, limited_threads
from dmiddleware.worker import BaseLearner
from middleware import OfflineRLContext, OnlineRLContext, RLContext


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch choose two threads, whatever this host has."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch_threads, "_DEFAULT_THREADS", 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_block_has_one_thread_and_restores_the_others() -> None:
    with limited_threads():
        assert torch.get_num_threads() == 1
        with limited_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_they_are_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), limited_threads():
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_the_environment_variable_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert chosen_threads() == 2
    with limited_threads():
        assert torch.get_num_threads() == 2


def test_the_program_may_ask_for_more() -> None:
    torch.set_num_threads(3)
    with limited_threads():
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("context", [OnlineRLContext, OfflineRLContext])
def test_a_run_has_one_thread_and_says_so_once(
    context: type[RLContext], caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    with caplog.at_level(logging.INFO, logger="dmiddleware"), Task(context()) as task:
        task.use(lambda ctx: seen.append(torch.get_num_threads()))
        task.run(max_step=1)
        task.use(lambda ctx: None).run(max_step=1)
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2
    said = [one for one in caplog.messages if "thread" in one]
    assert len(said) == 1
    assert said[0].startswith("torch uses 1 thread(s)") and "OMP_NUM_THREADS" in said[0]


def test_a_classic_learner_has_one_thread_until_it_is_closed(tmp_path: Path) -> None:
    with BaseLearner(exp_name=str(tmp_path)):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
