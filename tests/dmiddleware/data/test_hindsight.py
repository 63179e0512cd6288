import numpy as np
import pytest
import torch

from dmiddleware.data import (
    Batch,
    HindsightReplay,
    PrioritySampler,
    TensorBuffer,
    as_tree,
)
from dmiddleware.errors import ConfigError, StructureError

LENGTHS = (5, 1, 9, 3)
OWN_GOAL = -1.0


def reward(achieved, desired, info):
    assert info == {}
    return (achieved == desired).all(-1).astype(np.float32)


def reached(achieved, desired, info):
    return reward(achieved, desired, info) > 0


READS = {
    "index": lambda info: info["width"],
    "get": lambda info: info.get("width", 1.0),
    "pop": lambda info: info.pop("width", 1.0),
    "setdefault": lambda info: info.setdefault("width", 1.0),
    "in": lambda info: 1.0 if "width" in info else 2.0,
    "row": lambda info: info[0]["width"],
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("function", ["compute_reward", "compute_terminated"])
def test_a_function_that_reads_the_info_is_told_that_there_is_none(read, function):
    def reads_info(achieved, desired, info):
        return (achieved == desired).all(-1) * READS[read](info)

    functions = {"compute_reward": reward, function: reads_info}
    hindsight = HindsightReplay(**functions, n_goals=1000)
    buffer = TensorBuffer(100, follow_episodes=True, transform=hindsight, seed=0)
    buffer.push(episodes())
    with pytest.raises(ConfigError, match=rf"{function} reads .* stores no infos"):
        buffer.sample(8)


def episodes(lengths=LENGTHS):
    """Rows one after the other; what a row achieves is (episode, step), its own goal (-1, -1)."""
    here = [(episode, step) for episode, n in enumerate(lengths) for step in range(n)]
    at = torch.tensor(here, dtype=torch.float32)
    goal = torch.full_like(at, OWN_GOAL)
    after = at + torch.tensor([0.0, 1.0])
    done = torch.tensor([step == lengths[episode] - 1 for episode, step in here])
    return as_tree(
        {
            "obs": {"observation": at, "achieved_goal": at, "desired_goal": goal},
            "next_obs": {"observation": after, "achieved_goal": after, "desired_goal": goal},
            "action": torch.zeros(len(at), dtype=torch.int64),
            "reward": torch.full((len(at),), 7.0),
            "done": done,
            "terminated": done & (at[:, 0] == 0),
            "truncated": done & (at[:, 0] != 0),
            "episode_id": at[:, 0].long(),
        }
    )


def hindsight_buffer(*, rows=None, seed=0, sampler=None, store_next_obs=True, **options):
    buffer = TensorBuffer(
        100,
        follow_episodes=True,
        sampler=sampler,
        store_next_obs=store_next_obs,
        transform=HindsightReplay(reward, **options),
        seed=seed,
    )
    buffer.push(episodes() if rows is None else rows)
    return buffer


def relabelled(batch: Batch) -> torch.Tensor:
    return batch.obs.desired_goal[:, 0] != OWN_GOAL


@pytest.mark.parametrize("store_next_obs", [True, False])
@pytest.mark.parametrize("strategy", ["future", "final"])
def test_new_goals_are_states_that_the_same_episode_reached_later(strategy, store_next_obs):
    buffer = hindsight_buffer(strategy=strategy, n_goals=1000, store_next_obs=store_next_obs)
    n_different = 0
    for _ in range(30):
        batch = buffer.sample(10)
        episode, step = batch.obs.desired_goal[relabelled(batch)].unbind(-1)
        own_episode, own_step = batch.obs.observation[relabelled(batch)].unbind(-1)
        last = torch.tensor(LENGTHS)[own_episode.long()]
        assert torch.equal(episode, own_episode)
        assert ((step > own_step) & (step <= last)).all()
        if strategy == "final":
            assert torch.equal(step, last.float())
        n_different += int((step < last).sum())
        assert torch.equal(batch.obs.desired_goal, batch.next_obs.desired_goal)
    assert (n_different > 0) == (strategy == "future")


def test_rewards_and_ends_are_those_of_the_new_goals():
    buffer = hindsight_buffer(compute_terminated=reached, n_goals=1)
    n_reached = 0
    for _ in range(30):
        batch = buffer.sample(10)
        new = relabelled(batch)
        hit = (batch.next_obs.achieved_goal == batch.obs.desired_goal).all(-1)
        assert torch.equal(batch.reward[new], hit[new].float())
        assert torch.equal(batch.terminated[new], hit[new])
        assert torch.equal(batch.done[new], (hit | batch.truncated)[new])
        assert (batch.reward[~new] == 7.0).all()
        assert torch.equal(batch.terminated[~new], (batch.done & ~batch.truncated)[~new])
        n_reached += int(hit.sum())
    assert n_reached > 10


def test_without_a_function_the_ends_of_episodes_stay():
    buffer, plain = hindsight_buffer(n_goals=1000), TensorBuffer(100, seed=0)
    plain.push(episodes())
    batch = buffer.sample(18)
    before = plain.get(batch["index"])
    for name in ("done", "terminated", "truncated"):
        assert torch.equal(batch[name], before[name])


def test_stored_rows_keep_their_goals():
    buffer = hindsight_buffer(n_goals=1000)
    for _ in range(5):
        buffer.sample(18)
    stored = buffer.get(buffer.index)
    assert (stored.obs.desired_goal == OWN_GOAL).all()
    assert (stored.reward == 7.0).all()


@pytest.mark.parametrize("n_goals", [1, 4])
def test_new_goals_have_their_share_of_the_rows(n_goals):
    buffer = hindsight_buffer(n_goals=n_goals)
    count = sum(int(relabelled(buffer.sample(18)).sum()) for _ in range(200))
    share = n_goals / (n_goals + 1)
    assert abs(count / 3600 - share) < 4 * (share * (1 - share) / 3600) ** 0.5


def test_rows_of_an_episode_that_has_not_ended_take_goals_from_its_known_part():
    rows = episodes((4,))
    rows["done"][:] = rows["terminated"][:] = False
    buffer = hindsight_buffer(rows=rows, strategy="final", n_goals=1000)
    batch = buffer.sample(4)
    assert (batch.obs.desired_goal[relabelled(batch), 1] == 4.0).all()


def test_samples_are_the_same_with_the_same_seed_and_after_loading():
    buffer, other = hindsight_buffer(), hindsight_buffer(seed=5)
    buffer.sample(10)
    other.load_state_dict(buffer.state_dict())
    for _ in range(3):
        one, two = buffer.sample(10), other.sample(10)
        assert torch.equal(one.obs.desired_goal, two.obs.desired_goal)
        assert torch.equal(one.reward, two.reward)


def test_priorities_work_with_new_goals():
    buffer = hindsight_buffer(sampler=PrioritySampler(), n_goals=1000)
    buffer.update_priority(buffer.index, np.where(buffer.index == 2, 1e6, 1e-6))
    batch = buffer.sample(10)
    assert (batch["index"] == 2).all()
    assert (batch.obs.desired_goal[relabelled(batch), 1] >= 3.0).all()


def test_goals_of_any_shape_and_dtype_are_replaced():
    def bits(column):
        return (column[..., None] > torch.arange(4)).to(torch.int8)

    rows = episodes((9,))
    for name in ("obs", "next_obs"):
        rows[name] = as_tree({key: bits(rows[name][key]) for key in rows[name]})
    hindsight = HindsightReplay(lambda a, d, info: (a == d).all((1, 2)) - 1.0, n_goals=1000)
    buffer = TensorBuffer(20, follow_episodes=True, transform=hindsight, seed=0)
    buffer.push(rows)
    batch = buffer.sample(9)
    assert batch.obs.desired_goal.shape == (9, 2, 4)
    assert batch.obs.desired_goal.dtype == torch.int8
    assert (batch.obs.desired_goal[:, 0] == 0).all()
    assert batch.reward.dtype == torch.float32
    assert set(batch.reward.tolist()) <= {0.0, -1.0, 7.0}


@pytest.mark.parametrize(
    "options",
    [{"n_step": 3, "follow_episodes": True}, {"unroll_len": 4, "follow_episodes": True}, {}],
    ids=["n_step", "unroll_len", "follow_episodes"],
)
def test_buffer_that_cannot_give_single_steps_of_episodes_is_refused(options, request):
    name = request.node.callspec.id
    with pytest.raises(ConfigError, match=name):
        TensorBuffer(10, transform=HindsightReplay(reward), **options)


def test_rows_of_n_step_returns_are_refused():
    rows = episodes()
    rows["discount"] = torch.full((18,), 0.9)
    with pytest.raises(ConfigError, match="n_step=1"):
        hindsight_buffer(rows=rows).sample(2)


@pytest.mark.parametrize("name", ["obs", "next_obs"])
def test_rows_without_goals_are_refused(name):
    rows = episodes()
    rows[name] = rows[name]["observation"]
    with pytest.raises(StructureError, match=rf"no {name}\.desired_goal"):
        hindsight_buffer(rows=rows).sample(2)


def test_function_of_one_pair_of_goals_is_refused():
    one_pair = HindsightReplay(lambda a, d, info: -float(np.linalg.norm(a - d)), n_goals=1000)
    buffer = TensorBuffer(20, follow_episodes=True, transform=one_pair, seed=0)
    buffer.push(episodes())
    with pytest.raises(StructureError, match="compute_reward must return one value for each of 10"):
        buffer.sample(10)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"compute_reward": None}, ConfigError),
        ({"compute_terminated": True}, ConfigError),
        ({"strategy": "episode"}, ConfigError),
        ({"n_goals": 0}, ValueError),
        ({"n_goals": 1.5}, ConfigError),
    ],
    ids=str,
)
def test_invalid_argument_is_refused(arguments, error):
    with pytest.raises(error):
        HindsightReplay(**{"compute_reward": reward, **arguments})
