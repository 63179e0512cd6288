"""Registries: names for classes and functions."""

from __future__ import annotations

import sys

import pytest

from dmiddleware.errors import RegistryError
from dmiddleware.registry import Registry, import_modules, nearest


@pytest.fixture
def registry():
    registry = Registry("policy")

    @registry.register("dqn")
    class DQN:
        pass

    registry.register("ppo")(object())
    return registry


def test_a_registered_object_is_found_unchanged(registry):
    class SAC:
        pass

    assert registry.register("sac")(SAC) is SAC
    assert registry.get("sac") is SAC
    assert "sac" in registry
    assert list(registry) == ["dqn", "ppo", "sac"]
    assert len(registry) == 3


def test_the_error_for_an_unknown_name_suggests_similar_ones_and_import_names(registry):
    with pytest.raises(RegistryError) as caught:
        registry.get("dqnn")
    message = str(caught.value)
    assert message.startswith("no policy is registered as 'dqnn'; did you mean dqn?")
    assert "import_names" in message
    assert isinstance(caught.value, KeyError)


def test_the_error_for_an_unknown_name_lists_all_if_none_is_similar(registry):
    with pytest.raises(RegistryError, match="known names are: dqn, ppo"):
        registry.get("zzzzzz")
    with pytest.raises(RegistryError, match=r"known names are: \(none\)"):
        Registry("buffer").get("x")


@pytest.mark.parametrize("name", [None, 3, ["dqn"]])
def test_names_that_are_not_strings_are_unknown(registry, name):
    with pytest.raises(RegistryError, match="no policy is registered"):
        registry.get(name)


def test_a_name_cannot_be_registered_twice(registry):
    with pytest.raises(RegistryError, match="'dqn' is already registered"):
        registry.register("dqn")(object())


def test_registering_the_same_definition_again_is_fine(registry):
    """A module that is both run as a program and imported defines its classes twice."""
    source = "class Mine:\n    def __init__(self): self.x = 1\n"
    spaces = [{}, {}]
    for space in spaces:
        exec(source, space)
        registry.register("mine")(space["Mine"])
    assert registry.get("mine") is spaces[1]["Mine"]


def test_modules_are_imported_for_their_side_effects(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_modules(["my_policies"])
    assert sys.modules.pop("my_policies").LOADED
    with pytest.raises(ModuleNotFoundError):
        import_modules(["no_such_module"])


def test_nearest_names_come_best_first():
    assert nearest("train_dat", ["train_iter", "train_data", "obs"])[0] == "train_data"
    assert nearest("zzz", ["train_data"]) == []
    assert len(nearest("epoch", [f"epoch{n}" for n in range(9)], n=2)) == 2


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("update_per_collect", ["target_update_freq", "batch_size"], []),
        (
            "update_per_collect",
            ["target_update_freq", "update_per_collect"],
            ["update_per_collect"],
        ),
        ("lr", ["learning_rate", "nstep"], []),
        ("discount", ["discount_factor", "count"], ["discount_factor"]),
        ("ReLU", ["relu", "elu"], ["relu"]),
        ("batchsize", ["learn.batch_size", "batch.other"], ["learn.batch_size"]),
        ("learn.batchsize", ["eval.batch_size"], ["eval.batch_size"]),
        ("learn.epochs", ["learn.learner.hook", "learn.batch_size"], []),
    ],
)
def test_only_probable_typos_are_suggested(name, known, expected):
    assert nearest(name, known)[:1] == expected
