import functools
import json
import math
import random
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, IntFlag

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strange_envs import SavesItself, Walk, WithSimulator

from dmiddleware.env import make_env_manager
from dmiddleware.env.env_state import (
    Decoder,
    Encoder,
    MissingObjectError,
    NotSavableError,
    decode_infos,
    encode_infos,
    get_state,
    set_state,
)
from dmiddleware.errors import CheckpointMismatch
from dmiddleware.files.checkpoint import load_checkpoint, save_checkpoint

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.integers(0, 255).map(np.uint8),
    st.floats(allow_nan=False, width=32).map(np.float32),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=7)),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
        st.sets(st.integers(0, 9), max_size=3),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=8,
)


def is_plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str, np.ndarray)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_values_come_back_with_their_types(value):
    def typed(one):
        if isinstance(one, dict):
            return dict, [(typed(key), typed(item)) for key, item in one.items()]
        if isinstance(one, set | frozenset):
            return type(one), sorted(map(repr, one))
        if isinstance(one, list | tuple | deque):
            return type(one), getattr(one, "maxlen", None), list(map(typed, one))
        return type(one), one

    encoded = Encoder().encode(value)
    assert is_plain(encoded)
    assert typed(Decoder().decode(encoded)) == typed(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.zeros((), np.float64),
        np.array([b"SF", b"G"]),
        np.array(["left", "right"]),
        np.array([True, False]),
        np.zeros((0, 3), np.float32),
    ],
)
def test_arrays_come_back(array):
    again = Decoder().decode(Encoder().encode(array))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        np.array([None]),
        np.array([1j]),
        iter(()),
        range(3),
        math.pi + 1j,
        [object],
    ],
)
def test_unknown_objects_are_rejected_and_classes_are_skipped(value):
    if value == [object]:
        assert Decoder().decode(Encoder().encode(value), [int]) == [int]
    else:
        with pytest.raises(NotSavableError):
            Encoder().encode({"deep": [value]})


def test_objects_shared_by_two_names_stay_shared():
    shared = [1, np.zeros(2)]
    again = Decoder().decode(Encoder().encode({"a": shared, "b": (shared, shared[1])}))
    assert again["a"] is again["b"][0]
    assert again["a"][1] is again["b"][1]


def test_two_views_of_one_memory_are_rejected():
    memory = np.zeros(4)
    with pytest.raises(NotSavableError):
        Encoder().encode([memory, memory[:2]])
    assert Decoder().decode(Encoder().encode([memory[:2]]))[0].shape == (2,)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.zeros((), dtype=torch.float64),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros((0, 3)),
        torch.ones(2, requires_grad=True),
        torch.arange(6).reshape(2, 3).T,
    ],
)
def test_tensors_come_back(tmp_path, tensor):
    save_checkpoint(tmp_path / "state", {"env": Encoder().encode([tensor, torch.zeros(0)])})
    again = Decoder().decode(load_checkpoint(tmp_path / "state")["env"])[0]
    assert again.dtype == tensor.dtype
    assert again.requires_grad == tensor.requires_grad
    assert torch.equal(again, tensor)


@pytest.mark.parametrize(
    "view", [lambda array: array[:2], torch.as_tensor, lambda array: torch.as_tensor(array)[1:]]
)
def test_tensors_and_arrays_of_one_memory_are_rejected(view):
    memory = np.zeros(4)
    for values in ([memory, view(memory)], [view(memory), memory]):
        with pytest.raises(NotSavableError):
            Encoder().encode(values)
    tensor = torch.zeros(4)
    with pytest.raises(NotSavableError):
        Encoder().encode(
            [tensor, view(tensor)] if view(tensor) is not tensor else [tensor[1:], tensor]
        )


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2).to_sparse(), torch.nn.Parameter(torch.ones(1))],
)
def test_tensors_that_are_not_plain_are_rejected(tensor):
    with pytest.raises(NotSavableError):
        Encoder().encode(tensor)


def test_a_generator_of_torch_continues_where_it_was():
    old, new = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    encoded = Encoder().encode([old, old])
    first, second = Decoder().decode(encoded, [new, new])
    assert first is second is new
    assert torch.equal(torch.rand(3, generator=new), torch.rand(3, generator=old))
    with pytest.raises(MissingObjectError, match=r"a torch\.Generator on cpu .* has None"):
        Decoder().decode(encoded)


def test_a_simulator_in_torch_continues_as_if_never_interrupted():
    class Simulator(gym.vector.VectorEnv):
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        single_action_space = gym.spaces.Discrete(2)

        def __init__(self, num_envs):
            self.num_envs, self.device, self.dtype = num_envs, torch.device("cpu"), torch.float32
            self.generator, self.over = torch.Generator(), torch.zeros(num_envs, dtype=torch.bool)
            self.shape, self.place = torch.zeros(num_envs, 2).shape, None

        def reset(self, *, seed=None, options=None):
            self.generator.manual_seed(seed or 0)
            self.place = torch.zeros(self.shape, dtype=self.dtype)
            return self.place, {}

        def step(self, actions):
            self.place = self.place + torch.randn(self.shape, generator=self.generator)
            self.place[self.over] = 0
            self.over = (self.place[:, 0].abs() > 2) & ~self.over
            return self.place, self.place.sum(1), self.over, torch.zeros_like(self.over), {}

    managers = [make_env_manager(Simulator, env_num=3, mode="vector", seed=i) for i in range(2)]
    with managers[0] as old, managers[1] as new:
        for _ in range(9):
            old.step(old.sample_actions())
        assert new.load_state_dict(old.state_dict()) is True
        for _ in range(20):
            steps = [envs.step(np.zeros(3, np.int64)) for envs in (old, new)]
            assert torch.equal(steps[0].next_obs, steps[1].next_obs)
            np.testing.assert_array_equal(steps[0].valid, steps[1].valid)


def test_a_container_that_contains_itself_is_rejected():
    loop = []
    loop.append(loop)
    with pytest.raises(NotSavableError):
        Encoder().encode(loop)


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("x",)


class WithSlotsAndDict(Slotted):
    pass


class Seeded(random.Random):
    """Has a generator written in C beneath."""


@pytest.mark.parametrize("value", [Slotted(), WithSlotsAndDict(), Seeded(1)])
def test_objects_that_hold_more_than_their_attributes_show_are_rejected(value):
    with pytest.raises(NotSavableError):
        Encoder().encode(value)


def test_objects_are_changed_in_place_and_may_refer_to_each_other():
    def family():
        one, other = Holder(name="one", age=1), Holder(name="other")
        one.friend, other.friend = other, one
        return Holder(people=[one, other], first=one)

    old = family()
    old.first.age = 7
    encoded = json.loads(json.dumps(Encoder().encode(old)))
    new = family()
    people = list(new.people)
    Decoder().decode(encoded, new)
    assert new.people[0] is people[0] is new.first
    assert people[0].age == 7
    assert people[0].friend is people[1]
    with pytest.raises(CheckpointMismatch, match="an object where this env has None"):
        Decoder().decode(encoded, Holder(people=[None, None]))


class Phase(Enum):
    """What an env may be in; a class of its own, at the top of a module."""

    WALK = 1
    REST = 2


class Side(IntFlag):
    LEFT = 1
    RIGHT = 2


def test_members_of_enums_come_back_and_stay_what_they_are():
    old, new = Holder(now=Phase.REST, side=Side.RIGHT, seen=[Phase.WALK]), Holder(now=Phase.WALK)
    encoded = json.loads(json.dumps(Encoder().encode(old)))
    Decoder().decode(encoded, new)
    assert (new.now, new.side, new.seen) == (Phase.REST, Side.RIGHT, [Phase.WALK])
    assert [(one.name, one.value) for one in Phase] == [("WALK", 1), ("REST", 2)]
    with pytest.raises(NotSavableError):
        Encoder().encode(Side.LEFT | Side.RIGHT)


def test_members_of_local_enums_are_found_in_the_existing_values():
    class Local(Enum):
        A = 1
        B = 2

    encoded = Encoder().encode(Local.B)
    assert Decoder().decode(encoded, Local.A) is Local.B
    with pytest.raises(CheckpointMismatch, match="Local, which is not known here"):
        Decoder().decode(encoded, Phase.WALK)
    with pytest.raises(CheckpointMismatch, match="has no such member"):
        Decoder().decode({**encoded, "value": "C"}, Local.A)


def test_frozen_dataclasses_are_restored_too():
    @dataclass(frozen=True)
    class Options:
        size: int

    old, new = Holder(options=Options(3)), Holder(options=Options(4))
    Decoder().decode(Encoder().encode(old), new)
    assert new.options == Options(3)


def test_the_spaces_of_an_env_may_be_properties():
    class ByProperty(Walk):
        @property
        def action_space(self):
            return gym.spaces.Discrete(3)

    old, new = ByProperty(), ByProperty()
    for seed, env in enumerate((old, new)):
        env.reset(seed=seed)
    old.step(1)
    set_state(new, get_state(old))
    np.testing.assert_array_equal(new.step(2)[0], old.step(2)[0])


@pytest.mark.parametrize("bit_generator", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_continue_where_they_were(bit_generator):
    old, new = np.random.Generator(bit_generator(1)), np.random.Generator(bit_generator(2))
    encoded = Encoder().encode({"a": old, "python": random.Random(3)})
    expected = old.random(4)
    again = Decoder().decode(encoded, {"a": new})
    assert again["a"] is new
    np.testing.assert_array_equal(new.random(4), expected)
    np.testing.assert_array_equal(Decoder().decode(encoded)["a"].random(4), expected)
    assert again["python"].random() == random.Random(3).random()


@dataclass
class Position:
    x: float
    y: float


class Complicated(Walk):
    """Keeps its state in all kinds of places."""

    def __init__(self):
        super().__init__()
        self.history = deque(maxlen=3)
        self.position = Position(0.0, 0.0)
        self.dice = random.Random(5)
        self.table = {(0, 1): np.float32(2), "k": {3}}
        self.callback = lambda: None
        self.visits = np.zeros(4, np.int64)

    def step(self, action):
        obs, _, *rest = super().step(action)
        self.history.append(obs)
        self.position.x += self.dice.random()
        self.visits[self.t % 4] += 1
        self.table[0, 1] += self.np_random.random(dtype=np.float32)
        reward = self.position.x + self.visits.sum() + self.table[0, 1] + len(self.history)
        return obs, float(reward), *rest


CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]


@pytest.mark.parametrize("name", [*CLASSIC, "FrozenLake-v1", "Blackjack-v1", "complicated"])
def test_a_restored_env_continues_as_if_never_interrupted(name, tmp_path):
    def make(seed):
        env = Complicated() if name == "complicated" else gym.make(name, max_episode_steps=9)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if isinstance(env.observation_space, gym.spaces.Box):
            env = gym.wrappers.NormalizeObservation(gym.wrappers.FrameStackObservation(env, 2))
        env.reset(seed=seed)
        env.action_space.seed(seed)
        return env

    def run(env, n):
        found = []
        for _ in range(n):
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                obs, _ = env.reset()
            found.append((obs, reward, terminated, truncated))
        return found

    old, new = make(1), make(2)
    run(old, 5)
    save_checkpoint(tmp_path / "state", get_state(old))
    expected = run(old, 25)
    set_state(new, load_checkpoint(tmp_path / "state"))
    np.testing.assert_equal(run(new, 25), expected)


def test_an_env_that_holds_a_simulator_cannot_be_saved_but_may_save_itself():
    simulated, own = WithSimulator(), SavesItself()
    simulated.reset(seed=0)
    own.reset(seed=0)
    assert get_state(simulated) is None
    own.step(1)
    state = get_state(own)
    other = SavesItself()
    other.reset(seed=5)
    set_state(other, state)
    np.testing.assert_array_equal(other.step(2)[0], own.step(2)[0])


def test_a_state_is_a_copy():
    env = Complicated()
    env.reset(seed=0)
    env.step(1)
    state = get_state(env)
    before = repr(state)
    env.step(1)
    assert repr(state) == before


def test_the_state_of_another_env_is_rejected():
    walk, wrapped = Walk(), gym.wrappers.ClipReward(Walk(), 0, 1)
    walk.reset(seed=0)
    with pytest.raises(
        CheckpointMismatch, match="the saved env is Walk, this one is ClipReward > Walk"
    ):
        set_state(wrapped, get_state(walk))


def test_infos_are_saved_if_they_are_plain():
    infos = [{"a": np.arange(2), "b": (1, "x")}, {"lock": threading.Lock()}, {}]
    objects = [{"who": Holder(name="one")}, {"space": gym.spaces.Discrete(2)}]
    again = decode_infos(encode_infos([*infos, *objects]))
    np.testing.assert_equal(again, [infos[0], {}, {}, {}, {}])


@pytest.mark.parametrize("other", [threading.Lock(), Holder(name="one"), len, [math.pi + 1j]])
def test_a_value_that_cannot_be_saved_leaves_the_other_values_of_an_info(other):
    mask = np.array([1, 0, 1], np.int8)
    info = {"lives": 3, "other": other, "action_mask": mask, "same": mask[:2]}
    again = decode_infos(encode_infos([info, {"t": 1}]))
    np.testing.assert_equal(again, [{"lives": 3, "action_mask": mask}, {"t": 1}])


@pytest.mark.parametrize("existing", [None, {}, {1: len}, {0: None}])
def test_a_function_that_the_env_lacks_is_reported(existing):
    with pytest.raises(MissingObjectError, match="a function where this env has None"):
        Decoder().decode(Encoder().encode({0: len}), existing)


def test_functions_with_arguments_bound_are_code():
    value = [functools.partial(Walk, 3), len]
    assert Decoder().decode(Encoder().encode(value), value) == value


def test_an_env_of_an_extension_whose_types_have_no_module_starts_a_new_episode():
    pytest.importorskip("Box2D")
    with make_env_manager("LunarLander-v3", env_num=1, seed=0) as envs:
        envs.step(np.array([2]))
        assert envs.load_state_dict(envs.state_dict()) is False
