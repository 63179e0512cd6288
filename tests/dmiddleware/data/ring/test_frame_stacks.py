import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import (
    PrioritySampler,
    TensorBuffer,
    as_tree,
    leaves,
    load_checkpoint,
    save_checkpoint,
)
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError


class StackingEnvs:
    """Envs whose observations are stacks of random frames, with the successor of each row.

    At the start of an episode the stack repeats the first frame, is filled with zeros, or continues
    that of the episode before, as after the loss of a life. With ``odd``, some stacks do not
    continue the one before.
    """

    def __init__(self, env_num, seed, *, depth=4, shape=(2, 2), first_id=0, odd=False, length=6):
        self.generator = np.random.default_rng(seed)
        self.depth, self.shape, self.odd, self.length = depth, shape, odd, length
        self.next_id = first_id
        self.stacks = [np.zeros((depth, *shape), np.uint8) for _ in range(env_num)]
        self.ids = [self._begin(env) for env in range(env_num)]

    def _frame(self):
        return self.generator.integers(0, 256, self.shape, dtype=np.uint8)

    def _begin(self, env):
        kind = self.generator.choice(["repeated", "zero", "continued"])
        if kind == "repeated":
            self.stacks[env] = np.repeat(self._frame()[None], self.depth, axis=0)
        elif kind == "zero":
            self.stacks[env] = np.zeros_like(self.stacks[env])
            self.stacks[env][-1] = self._frame()
        self.next_id += 1
        return self.next_id

    def step(self):
        rows = []
        for env, stack in enumerate(self.stacks):
            following = np.concatenate([stack[1:], self._frame()[None]])
            if self.odd and self.generator.random() < 0.2:
                following = np.stack([self._frame() for _ in range(self.depth)])
            terminated = self.generator.random() < 1 / self.length
            rows.append(
                {
                    "obs": {"image": stack, "speed": np.float32(self.ids[env])},
                    "next_obs": {"image": following, "speed": np.float32(self.ids[env])},
                    "reward": np.float32(self.generator.normal()),
                    "done": terminated,
                    "terminated": terminated,
                    "truncated": False,
                    "episode_id": self.ids[env],
                }
            )
            self.stacks[env] = following
            if terminated:
                self.ids[env] = self._begin(env)
        return rows

    def batch(self, n_steps, *, flat=False):
        """Return ``[T, E]`` rows, or ``[T * E]``."""
        rows = [row for _ in range(n_steps) for row in self.step()]
        lead = (len(rows),) if flat else (n_steps, len(self.stacks))

        def column(values):
            array = np.stack(values)
            return array.reshape(*lead, *array.shape[1:])

        def nested(name):
            return {k: column([row[name][k] for row in rows]) for k in ("image", "speed")}

        columns = {k: column([row[k] for row in rows]) for k in rows[0] if "obs" not in k}
        return as_tree({**columns, "obs": nested("obs"), "next_obs": nested("next_obs")})


def assert_same(ours, theirs):
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert torch.equal(leaf, theirs[path]), path


def sample_of(buffer, n):
    try:
        return buffer.sample(n)
    except NotEnoughData:  # no sequence starts
        return as_tree({})


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "push", "flat", "clear", "restore"]),
        st.integers(0, 1),
        st.integers(1, 7),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(
    actions=ACTIONS,
    size=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 4),
    odd=st.booleans(),
    options=st.sampled_from([{}, {"n_step": 3, "discount": 0.9}, {"unroll_len": 5, "stride": 2}]),
)
def test_frames_stored_once_are_sampled_as_the_stacks_that_were_pushed(
    actions, size, seed, depth, odd, options
):
    def make_once():
        return TensorBuffer(
            size, frame_stacks=("obs.image",), store_next_obs=False, seed=seed, **options
        )

    once, full = make_once(), TensorBuffer(size, seed=seed, **options)
    envs = [
        StackingEnvs(3, seed, depth=depth, odd=odd),
        StackingEnvs(2, seed + 1, depth=depth, odd=odd, first_id=1000),
    ]
    for name, which, n in actions:
        if name in ("push", "flat"):
            batch = envs[which].batch(n, flat=name == "flat")
            assert once.push(batch) == full.push(batch)
        elif name == "clear":
            once.clear()
            full.clear()
        elif name == "restore":
            state, once = once.state_dict(), make_once()
            once.load_state_dict(state)
        if len(full):
            assert_same(once.get(once.index), full.get(full.index))
            n_drawn = 1 if "unroll_len" in options else len(full)
            assert_same(sample_of(once, n_drawn), sample_of(full, n_drawn))


def test_stacks_are_whole_after_their_first_frames_have_left_the_ring():
    envs = StackingEnvs(2, 0, length=10**9)
    once = TensorBuffer(10, frame_stacks=("obs.image",), store_next_obs=False)
    full = TensorBuffer(10)
    for _ in range(30):
        batch = envs.batch(1)
        once.push(batch)
        full.push(batch)
        assert_same(once.get(once.index), full.get(full.index))


@pytest.mark.parametrize("sampler", [None, PrioritySampler])
def test_a_saved_buffer_continues_with_the_same_stacks(sampler, tmp_path):
    def make(seed):
        return TensorBuffer(
            40,
            frame_stacks=("obs.image",),
            store_next_obs=False,
            n_step=3,
            discount=0.9,
            sampler=sampler and sampler(),
            seed=seed,
        )

    buffer, restored = make(0), make(1)
    envs = StackingEnvs(3, 0)
    for _ in range(9):
        buffer.push(envs.batch(2))
    save_checkpoint(tmp_path / "buffer.ckpt", buffer.state_dict())
    restored.load_state_dict(load_checkpoint(tmp_path / "buffer.ckpt"))
    for _ in range(20):
        assert_same(buffer.sample(8), restored.sample(8))
        batch = envs.batch(2)
        buffer.push(batch)
        restored.push(batch)
    with pytest.raises(CheckpointMismatch, match="frame_stacks"):
        TensorBuffer(
            40, store_next_obs=False, n_step=3, sampler=sampler and sampler()
        ).load_state_dict(buffer.state_dict())


def test_a_million_rows_of_four_frames_of_84_by_84_fit_into_8_gb():
    size = 2_000
    envs = StackingEnvs(4, 0, shape=(84, 84), length=200)
    buffer = TensorBuffer(size, frame_stacks=("obs.image",), store_next_obs=False)
    for _ in range(20):
        buffer.push(envs.batch(30))
    assert len(buffer) == size  # full, and older rows have been overwritten
    assert buffer.nbytes / size * 1_000_000 < 8e9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frame_stacks": ("obs",)}, ValueError, "store_next_obs=False"),
        ({"frame_stacks": "obs", "store_next_obs": False}, ConfigError, "several names"),
        ({"frame_stacks": ("action",), "store_next_obs": False}, ValueError, "leaves of obs"),
    ],
)
def test_wrong_options_of_frame_stacks_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        TensorBuffer(10, **options)


@pytest.mark.parametrize("path", ["obs.speed", "obs.depth"])
def test_a_leaf_that_is_not_a_stack_of_frames_is_rejected_at_the_first_push(path):
    buffer = TensorBuffer(10, frame_stacks=(path,), store_next_obs=False)
    with pytest.raises(StructureError, match=path):
        buffer.push(StackingEnvs(2, 0).batch(1))
