"""Videos of episodes, of envs whose images have any form."""

from __future__ import annotations

import functools
import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image

from dmiddleware.env import (
    AsyncEnvManager,
    EnvSettings,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.errors import ConfigError, EnvStateError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import evaluate_episodes, record_video, write_video
from middleware import InteractionEvaluator, MetricsLogger, OnlineRLContext

SIZE = (4, 6, 3)


class Shown(gym.Env):
    """Episodes of a few steps; ``draw(t)`` returns the picture of the state after step t."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, draw, render_mode="rgb_array", length=3):
        self.draw, self.render_mode, self.length, self.t = draw, render_mode, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == self.length, False, {}

    def render(self):
        return self.draw(self.t)


def flat(t):
    return np.full(SIZE, 10 * t, np.uint8)


def policy():
    model = {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [4]}
    return DQNPolicy({"seed": 0, "model": model})


def film(envs, n_episode=1, max_frames=99):
    with envs:
        monitor = evaluate_episodes(policy(), envs, n_episode, max_frames=max_frames)
    return monitor.get_video() if monitor.has_video else None


PICTURE = (np.arange(4 * 6 * 3).reshape(SIZE) * 3).astype(np.uint8)
GRAY = PICTURE[..., 0]
GRAY_RGB = np.repeat(GRAY[..., np.newaxis], 3, axis=2)
BLACK_OR_WHITE = np.where(GRAY_RGB > 99, 255, 0)
WITH_ALPHA = np.concatenate([PICTURE, np.full((4, 6, 1), 7, np.uint8)], axis=2)

FORMS = [
    ("uint8", PICTURE, PICTURE),
    ("read-only", np.broadcast_to(PICTURE[:1], SIZE), np.broadcast_to(PICTURE[:1], SIZE)),
    ("channels first", PICTURE.transpose(2, 0, 1), PICTURE),
    ("alpha", WITH_ALPHA, PICTURE),
    ("alpha first", WITH_ALPHA.transpose(2, 0, 1), PICTURE),
    ("gray", GRAY, GRAY_RGB),
    ("gray with a channel", GRAY[..., np.newaxis], GRAY_RGB),
    ("gray with a channel first", GRAY[np.newaxis], GRAY_RGB),
    ("int64", PICTURE.astype(np.int64), PICTURE),
    ("floats to 255", PICTURE.astype(np.float64), PICTURE),
    ("floats to 1", (PICTURE / 255).astype(np.float32), PICTURE),
    ("half floats", (PICTURE / 255).astype(np.float16), PICTURE),
    ("bool", GRAY > 99, BLACK_OR_WHITE),
    ("nested lists", PICTURE.tolist(), PICTURE),
    ("a list of rows", list(PICTURE), PICTURE),
    ("a list of images", [PICTURE * 0, PICTURE], PICTURE),
    ("a tuple of images", (PICTURE * 0, PICTURE), PICTURE),
    ("an array of images", np.stack([PICTURE * 0, PICTURE]), PICTURE),
    ("tensor", torch.tensor(PICTURE), PICTURE),
    ("tensor channels first", torch.tensor(PICTURE).permute(2, 0, 1) / 255, PICTURE),
    ("gradients", (torch.tensor(GRAY) / 255).requires_grad_(), GRAY_RGB),
    ("bool tensor", torch.tensor(GRAY) > 99, BLACK_OR_WHITE),
    ("bfloat16 tensor", (torch.tensor(GRAY) > 99).bfloat16(), BLACK_OR_WHITE),
    ("a PIL image", Image.fromarray(PICTURE), PICTURE),
]

NO_IMAGES = [
    (None, "NoneType"),
    ("ansi text", "str"),
    ({"front": PICTURE}, "dict"),
    ([], "list of shape (0,)"),
    ([[1, 2], [3]], "list"),
    (7, "int"),
    (np.zeros(5, np.uint8), "ndarray of shape (5,)"),
    (np.zeros((5, 6, 2), np.uint8), "ndarray of shape (5, 6, 2)"),
    (np.zeros((0, 0, 3), np.uint8), "ndarray of shape (0, 0, 3)"),
    (np.zeros(SIZE, object), "ndarray of shape (4, 6, 3)"),
    (np.full(SIZE, 1j), "ndarray of shape (4, 6, 3)"),
    (np.full(SIZE, np.nan), "ndarray of shape (4, 6, 3)"),
    (np.full(SIZE, -1.0), "ndarray of shape (4, 6, 3)"),
    (np.full(SIZE, 60_000, np.uint16), "ndarray of shape (4, 6, 3)"),
    (torch.zeros(2, 2, 2, 2, 2), "Tensor of shape (2, 2, 2, 2, 2)"),
]


def raises(t):
    raise OSError("no display")


@pytest.mark.parametrize(
    ("frame", "expected"), [form[1:] for form in FORMS], ids=[f[0] for f in FORMS]
)
def test_an_image_of_any_form_is_shown_right(frame, expected, caplog):
    video = film(SyncEnvManager([functools.partial(Shown, lambda t: frame)]))
    assert video.shape == (1, 4, 3, 4, 6)
    np.testing.assert_allclose(video[0, 0].transpose(1, 2, 0), expected, atol=1)
    assert (video == video[:, :1]).all()
    assert not caplog.records


@pytest.mark.parametrize(("frame", "kind"), NO_IMAGES, ids=[kind for _, kind in NO_IMAGES])
def test_anything_else_is_left_out_with_one_warning(frame, kind, caplog):
    envs = SyncEnvManager([functools.partial(Shown, lambda t: frame)] * 2)
    assert film(envs, n_episode=4) is None
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "render()" in warning.getMessage()
    assert kind in warning.getMessage()
    with envs, pytest.raises(EnvStateError, match="render"):
        envs.render()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_env_that_cannot_show_itself_is_evaluated_all_the_same(mode, caplog):
    envs = make_env_manager(functools.partial(Shown, raises), env_num=2, mode=mode)
    with envs:
        monitor = evaluate_episodes(policy(), envs, 4, max_frames=9)
        assert envs.restarts == 0
    assert monitor.get_episode_return() == [3.0] * 4
    assert not monitor.has_video
    (warning,) = caplog.records
    assert "render() raised OSError: no display" in warning.getMessage()


def test_images_that_are_missing_now_and_then_are_left_out():
    video = film(SyncEnvManager([functools.partial(Shown, lambda t: flat(t) if t % 2 else None)]))
    assert video[0, :, 0, 0, 0].tolist() == [10, 30]


def test_images_may_grow_and_differ_between_envs():
    def draw(t, width):
        return np.full((4 + t, width, 3), 200, np.uint8)

    fns = [functools.partial(Shown, functools.partial(draw, width=w), length=w) for w in (2, 5)]
    video = film(SyncEnvManager(fns), n_episode=2)
    assert video.shape == (2, 6, 3, 9, 5)
    assert (video[1, 0, :, :4] == 200).all()
    assert (video[1, 0, :, 4:] == 0).all()
    assert (video[0, 0, :, :, 2:] == 0).all()
    assert (video[1, -1] == 200).all()


def managers():
    for mode in (gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.DISABLED):
        make = functools.partial(gym.vector.SyncVectorEnv, autoreset_mode=mode)
        yield mode.value, lambda fns, make=make: VectorEnvManager(lambda: make(fns), len(fns))
    yield "sync", SyncEnvManager
    yield "async", AsyncEnvManager
    yield "shared process", lambda fns: AsyncEnvManager(fns, envs_per_process=2)


@pytest.mark.parametrize("make", [make for _, make in managers()], ids=[n for n, _ in managers()])
def test_a_video_shows_an_episode_from_its_first_state_to_its_last(make):
    fns = [functools.partial(Shown, flat, length=length) for length in (3, 5)]
    video = film(make(fns), n_episode=4)
    shown = video[:, :, 0, 0, 0].tolist()
    assert shown == [[0, 10, 20, 30, 30, 30]] * 2 + [[0, 10, 20, 30, 40, 50]] * 2


def test_a_vector_env_that_resets_in_the_last_step_shows_all_states_but_the_last(caplog):
    mode = gym.vector.AutoresetMode.SAME_STEP
    make = functools.partial(gym.vector.SyncVectorEnv, autoreset_mode=mode)
    fns = [functools.partial(Shown, flat)] * 2
    video = film(VectorEnvManager(lambda: make(fns), 2), n_episode=4)
    assert video[:, :, 0, 0, 0].tolist() == [[0, 10, 20]] * 4
    assert not caplog.records


def test_a_vector_env_without_images_of_its_envs_is_evaluated_all_the_same(caplog):
    class Tiled(gym.vector.SyncVectorEnv):
        def render(self):
            return np.zeros((4, 12, 3), np.uint8)

    fns = [functools.partial(Shown, flat)] * 2
    assert film(VectorEnvManager(lambda: Tiled(fns), 2), n_episode=4) is None
    (warning,) = caplog.records
    assert (
        "render() of the vector env returned a ndarray of shape (4, 12, 3)" in warning.getMessage()
    )


def test_a_last_state_that_the_reset_draws_over_is_shown_as_it_was():
    canvas = np.zeros(SIZE, np.uint8)

    def draw(t):
        canvas[:] = 10 * t
        return canvas

    class Redrawn(Shown):
        def reset(self, **kwargs):
            first = super().reset(**kwargs)
            draw(0)
            return first

    for make in (SyncEnvManager, AsyncEnvManager):
        video = film(make([functools.partial(Redrawn, draw)]))
        assert video[0, :, 0, 0, 0].tolist() == [0, 10, 20, 30]


def test_a_video_has_no_more_frames_than_asked_for():
    assert film(SyncEnvManager([functools.partial(Shown, flat)]), max_frames=2).shape[1] == 2
    assert film(SyncEnvManager([functools.partial(Shown, flat)]), max_frames=4).shape[1] == 4


def test_gymnasiums_lists_of_images_are_shown():
    make = functools.partial(gym.make, "CartPole-v1", render_mode="rgb_array_list")
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [4]}
    with SyncEnvManager([make], seed=0) as envs:
        agent = DQNPolicy({"seed": 0, "model": model})
        monitor = evaluate_episodes(agent, envs, 1, max_frames=999)
    assert monitor.get_video().shape[1] == monitor.get_episode_return()[0] + 1


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_a_video_is_recorded_of_an_env_id_a_function_or_settings(suffix, tmp_path):
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [4]}
    agent = DQNPolicy({"seed": 0, "model": model})
    path = tmp_path / f"a.{suffix}"
    sizes = []
    for env in (
        "CartPole-v1",
        EnvSettings("CartPole-v1", env_num=7),
        functools.partial(gym.make, "CartPole-v1"),
    ):
        record_video(agent, env, str(path), seed=0)
        sizes.append(path.stat().st_size)
    assert sizes[0] == sizes[1] == sizes[2] > 1000


def test_a_video_of_an_env_without_images_is_refused(tmp_path):
    with pytest.raises(EnvStateError, match=r"render\(\) returned a NoneType"):
        record_video(policy(), functools.partial(Shown, lambda t: None), tmp_path / "a.gif")


@pytest.mark.parametrize("fps", [None, "fast", 0, -5, 2.5, float("inf")])
def test_any_frame_rate_of_an_env_gives_a_video(fps, tmp_path):
    class Rated(Shown):
        metadata = {"render_fps": fps}

    record_video(policy(), functools.partial(Rated, flat), tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 4


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_frames_of_any_form_are_written(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    frames = [
        np.zeros((33, 47), bool),
        torch.ones(3, 21, 35),
        np.ones((20, 50, 4), np.uint8).tolist(),
    ]
    write_video(str(path), frames, fps=10)
    assert path.stat().st_size > 100
    with pytest.raises(ConfigError, match="at least one image"):
        write_video(path, [], fps=10)


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_function_may_make_an_env_that_renders_images_itself(is_partial, tmp_path):
    def make(*, length=3):
        return Shown(flat)

    env = functools.partial(make, length=4) if is_partial else lambda: Shown(flat)
    record_video(policy(), env, tmp_path / "a.gif")
    assert (tmp_path / "a.gif").stat().st_size > 100
    with pytest.raises(EnvStateError, match="NoneType"):
        record_video(policy(), lambda: Shown(lambda t: None), tmp_path / "b.gif")


@pytest.mark.parametrize(
    "draw", [lambda t: None, raises, lambda t: [[t] * (t + 2)] * 4], ids=range(3)
)
def test_a_run_never_ends_by_its_videos(draw, run_folder):
    fns = [functools.partial(Shown, draw)] * 2
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(InteractionEvaluator(policy(), SyncEnvManager(fns), n_episode=2, video_every=1))
        task.use(MetricsLogger(run_folder))
        task.run(max_step=1)
        assert task.ctx.eval_value == 3.0
        has_video = "video" in task.ctx.eval_output
    assert has_video == (draw not in (raises,) and draw(0) is not None)
    assert run_folder.video_path(0).exists() == has_video


@pytest.fixture
def run_folder(tmp_path):
    from middleware import RunFolder

    with RunFolder.create("run", root=tmp_path) as folder:
        yield folder


@pytest.mark.parametrize(
    "options", [{"wrappers": [gym.vector.VectorWrapper]}, {"id": gym.vector.SyncVectorEnv}]
)
def test_a_video_of_what_is_for_a_vector_env_is_refused_in_words(options, tmp_path):
    env = EnvSettings(**{"id": "CartPole-v1", "env_num": 4, "mode": "vector", **options})
    with pytest.raises(ConfigError, match="single env"):
        record_video(policy(), env, tmp_path / "a.gif")


def test_a_video_is_made_of_an_env_that_requires_a_render_mode(tmp_path):
    class Picky(Shown):
        def __init__(self, *, render_mode):
            super().__init__(flat, render_mode)

    record_video(policy(), Picky, tmp_path / "a.gif")
    assert (tmp_path / "a.gif").exists()
