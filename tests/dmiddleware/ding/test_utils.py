"""Small functions of ``ding.utils``."""

from __future__ import annotations

import logging
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from easydict import EasyDict

from dmiddleware.ding import utils
from dmiddleware.policy import POLICY_REGISTRY

Point = namedtuple("Point", "x y")


def test_lists_and_dictionaries_are_turned_into_each_other() -> None:
    rows = [{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 4}, "only": 5}]
    assert utils.lists_to_dicts(rows) == {"a": [1, 3], "b": [{"c": 2}, {"c": 4}]}
    assert utils.lists_to_dicts(rows, recursive=True)["b"] == {"c": [2, 4]}
    assert utils.lists_to_dicts([Point(1, 2), Point(3, 4)]) == Point((1, 3), (2, 4))
    assert utils.dicts_to_lists({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match="empty"):
        utils.lists_to_dicts([])
    with pytest.raises(TypeError, match="int"):
        utils.lists_to_dicts([1])


def test_dictionaries_are_merged_at_all_depths() -> None:
    original = {"a": {"b": 1, "c": 2}, "d": 3}
    merged = utils.deep_merge_dicts(original, {"a": {"b": 4}, "e": 5})
    assert merged == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}
    assert original["a"] == {"b": 1, "c": 2}
    with pytest.raises(RuntimeError, match="'e'"):
        utils.deep_update({}, {"e": 5})


@pytest.mark.parametrize(
    ("data", "squeezed"), [([1], 1), ([1, 2], (1, 2)), ({"a": 1}, 1), ("abc", "abc")]
)
def test_what_is_alone_is_taken_out(data: Any, squeezed: Any) -> None:
    assert utils.squeeze(data) == squeezed


def test_minibatches_cover_all_rows_and_are_full() -> None:
    data = {
        "obs": {"x": torch.arange(5)},
        "pair": [torch.arange(5), torch.arange(5) + 10],
        "prev_state": list("abcde"),
        "weight": None,
        "kind": "text",
    }
    batches = list(utils.split_data_generator(data, 2, shuffle=False))
    assert [batch["obs"]["x"].tolist() for batch in batches] == [[0, 1], [2, 3], [3, 4]]
    assert batches[1]["pair"][1].tolist() == [12, 13]
    assert batches[2]["prev_state"] == ["d", "e"]
    assert (batches[0]["weight"], batches[0]["kind"]) == (None, "text")
    shuffled = list(utils.split_data_generator(data, 1))
    assert sorted(batch["obs"]["x"].item() for batch in shuffled) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="split_size"):
        next(utils.split_data_generator(data, 0))
    with pytest.raises(ValueError, match="column"):
        next(utils.split_data_generator({"kind": "text"}, 1))


def test_a_running_mean_is_that_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(3.0, 2.0, (1000, 2))
    running = utils.RunningMeanStd(shape=(2,))
    for part in np.split(rows, 4):
        running.update(part)
    np.testing.assert_allclose(running.mean, rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(running.std, rows.std(0), rtol=1e-4)
    numbers = utils.RunningMeanStd()
    numbers.update(rows[:, 0])
    assert numbers.mean == pytest.approx(rows[:, 0].mean(), rel=1e-4)


def test_places_are_counted() -> None:
    container = utils.LimitedSpaceContainer(0, 2)
    assert container.acquire_space() and container.get_residual_space() == 1
    assert not container.acquire_space()
    container.release_space()
    container.decrease_space()
    assert not container.acquire_space()
    container.increase_space()
    assert container.acquire_space()
    with pytest.raises(ValueError, match="max_val"):
        utils.LimitedSpaceContainer(2, 1)


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        utils.one_time_warning("only once")
    assert caplog.messages == ["only once"]


def test_threads_return_or_raise_what_their_targets_do() -> None:
    thread = utils.PropagatingThread(target=divmod, args=(7, 2))
    thread.start()
    assert thread.join() == (3, 1)
    thread = utils.PropagatingThread(target=divmod, args=(7, 0))
    thread.start()
    with pytest.raises(RuntimeError, match="raised") as raised:
        thread.join()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", utils.LockContextType)
def test_locks_are_held_in_their_block(kind: Any) -> None:
    lock = utils.LockContext(kind)
    with lock:
        assert not lock.lock.acquire(block=False) if kind.value == 2 else lock.lock.locked()
    lock.acquire()
    lock.release()


def test_a_watchdog_interrupts_what_takes_too_long() -> None:
    dog = utils.WatchDog(10)
    dog.start()
    with pytest.raises(TimeoutError, match="11 s"):
        dog._event()
    dog.stop()


def test_objects_are_saved_in_local_files_only(tmp_path: Path) -> None:
    path = str(tmp_path / "folder" / "state.pth.tar")
    utils.save_file(path, {"w": torch.ones(2)}, use_lock=True)
    assert utils.read_file(path)["w"].tolist() == [1.0, 1.0]
    for options in ({"path": "s3://bucket/x"}, {"path": path, "fs_type": "mc"}):
        with pytest.raises(ValueError, match="local files"):
            utils.read_file(**options)


def test_ports_are_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", utils.find_free_port()))


def test_a_logger_writes_text_and_numbers(tmp_path: Path) -> None:
    logger, writer = utils.build_logger(str(tmp_path), "learner")
    assert logger is not None and writer is not None
    logger.info("started")
    writer.add_scalar("loss", 0.5, 1)
    writer.close()
    assert "started" in (tmp_path / "learner_logger.txt").read_text()
    assert list((tmp_path / "learner_tb_logger").iterdir())
    assert utils.build_logger(str(tmp_path), need_tb=False, need_text=False) == (None, None)
    assert logger.name.startswith("learner") and isinstance(logger, logging.Logger)


def test_a_process_has_one_writer_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils.DistributedWriter, "root", None)
    assert utils.DistributedWriter.get_instance() is None
    first = utils.DistributedWriter.get_instance(str(tmp_path), write_to_disk=False)
    second = utils.DistributedWriter.get_instance(str(tmp_path), write_to_disk=False)
    assert utils.DistributedWriter.get_instance() is first is not second


def test_results_are_printed_without_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    text = utils.pretty_print({"reward": 1.5, "video": None})
    assert text == "reward: 1.5\n" and capsys.readouterr().out == "reward: 1.5\n\n"
    utils.pretty_print({"a": 1}, direct_print=False)
    assert capsys.readouterr().out == ""


def test_alone_a_program_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    x = torch.ones(2)
    with utils.DDPContext():
        assert (utils.get_rank(), utils.get_world_size()) == (0, 1)
        utils.allreduce(x)
        utils.broadcast(x)
    assert x.tolist() == [1.0, 1.0]


def test_sizes_are_divided_by_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmiddleware.ding.utils.ranks.get_world_size", lambda: 3)
    policy = {"learn": {"batch_size": 64}, "collect": {"n_sample": 8}}
    cfg = utils.to_ddp_config(EasyDict({"policy": policy}))
    assert (cfg.policy.learn.batch_size, cfg.policy.collect.n_sample) == (22, 3)


def test_registries_are_those_of_the_parts_here() -> None:
    assert utils.registries["policy"] is POLICY_REGISTRY is utils.POLICY_REGISTRY
    utils.import_module(["dmiddleware.ding.utils.ranks"])
    assert "naive" in utils.registries["dataset"]
