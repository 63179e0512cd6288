"""Data-parallel learning, with real processes over gloo."""

from functools import partial

import pytest
import torch

from dmiddleware import classic
from dmiddleware.distributed import gather_from_ranks, rank_and_world_size, sum_over_ranks
from dmiddleware.errors import ConfigError, NonFiniteLoss
from dmiddleware.policy import (
    A2CPolicy,
    DecisionTransformerPolicy,
    DQNPolicy,
    IPPOPolicy,
    PPGPolicy,
    PPOPolicy,
    R2D2Policy,
)
from dmiddleware.tree import as_tree, map_leaves, to_dict
from tests.dmiddleware.distributed.rank_processes import WORLD, run_ranks

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}


def rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "obs": torch.randn(n, 4, generator=generator),
        "next_obs": torch.randn(n, 4, generator=generator),
        "action": torch.randint(2, (n,), generator=generator),
        "reward": torch.randn(n, generator=generator),
        "terminated": torch.zeros(n, dtype=torch.bool),
    }


def half(batch, rank):
    size = len(batch["action"]) // WORLD
    return as_tree({key: leaf[rank * size : (rank + 1) * size] for key, leaf in batch.items()})


# Adam with a small eps would hide a gradient that is too large by a factor.
LEARN = {"adam_eps": 0.1}


def train_half(rank, *, overlap):
    # Another seed on every rank: the parameters must come from rank 0.
    policy = DQNPolicy(
        {
            "model": SMALL,
            "multi_gpu": True,
            "bp_update_sync": not overlap,
            **LEARN,
            "seed": rank,
        }
    )
    for seed in range(5):
        policy.learn_mode.forward(half(rows(32, seed), rank))
    return {k: v.tolist() for k, v in policy.learn_mode.state_dict()["model"].items()}


class TwoHeads(torch.nn.Module):
    """Each rank's rows touch another head."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 2)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, obs):
        return {"logit": self.first(obs) if bool(obs[0, 0] > 0) else self.second(obs)}


def train_heads(rank, *, overlap):
    torch.manual_seed(0)
    policy = DQNPolicy(
        {"multi_gpu": True, "bp_update_sync": not overlap, "double": False},
        model=TwoHeads(),
    )
    batch = rows(4, seed=0)
    for key in ("obs", "next_obs"):
        batch[key][:, 0] = 1.0 if rank == 0 else -1.0
    policy.learn_mode.forward(as_tree(batch))
    model = policy.model
    norms = [head.weight.grad.norm().item() > 0 for head in (model.first, model.second)]
    return norms, {k: v.tolist() for k, v in policy.learn_mode.state_dict()["model"].items()}


class OutOfOrder(torch.nn.Module):
    """Its layers are registered against the order in which they are used."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(8, 2)
        self.first = torch.nn.Linear(4, 8)

    def forward(self, obs):
        return {"logit": self.last(self.first(obs).tanh())}


def train_out_of_order(rank):
    torch.manual_seed(0)
    cfg = {"multi_gpu": rank is not None, "bp_update_sync": False, **LEARN}
    policy = DQNPolicy(cfg, model=OutOfOrder())
    for seed in range(3):
        whole = rows(16, seed)
        policy.learn_mode.forward(as_tree(whole) if rank is None else half(whole, rank))
    return {k: v.tolist() for k, v in policy.learn_mode.state_dict()["model"].items()}


def meet_nan(rank):
    policy = DQNPolicy({"model": SMALL, "multi_gpu": True, "seed": 0})
    batch = rows(8, seed=rank)
    if rank == 1:
        batch["reward"][0] = float("nan")
    try:
        policy.learn_mode.forward(as_tree(batch))
    except NonFiniteLoss:
        return "refused"
    return "learned"


def stop_on_kl(rank):
    policy = PPOPolicy({"model": SMALL, "multi_gpu": True, "target_kl": 0.01, "seed": 0})
    obs = torch.randn(8, 4)
    output = policy.collect_mode.forward(obs)
    shift = 1.0 if rank == 1 else 0.0
    batch = {**output, "obs": obs, "adv": torch.randn(8), "ret": torch.randn(8)}
    batch["log_prob"] = batch["log_prob"] + shift
    return policy.learn_mode.forward(as_tree(batch))["kl_stop"]


def ppo_rows(n, seed):
    """Rows for PPO, with advantages far from mean 0 and deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    logit = torch.randn(n, 2, generator=generator)
    action = torch.randint(2, (n,), generator=generator)
    return {
        "obs": torch.randn(n, 4, generator=generator),
        "action": action,
        "log_prob": torch.log_softmax(logit, -1)[torch.arange(n), action],
        "value": torch.randn(n, generator=generator),
        "adv": 3.0 + 5.0 * torch.randn(n, generator=generator),
        "ret": torch.randn(n, generator=generator),
    }


LONG = {
    "dqn": (DQNPolicy, rows, {"learning_rate": 1e-3, "target_update_freq": 20}),
    "ppo": (PPOPolicy, ppo_rows, {"target_kl": 100.0, "learning_rate": 1e-3}),
    "ppg": (PPGPolicy, ppo_rows, {"batch_size": 1000, "aux_freq": 10, "learning_rate": 1e-3}),
}


def train_long(name, rank, split=None):
    """Make 100 updates with batches of 64; a rank learns from its part of each."""
    cls, make_rows, options = LONG[name]
    cfg = {"model": SMALL, "seed": 0, "multi_gpu": split is not None, **options}
    policy = cls(cfg)
    for seed in range(100):
        batch = make_rows(64, seed)
        if split is not None:
            own = slice(0, split) if rank == 0 else slice(split, 64)
            batch = {key: column[own] for key, column in batch.items()}
        policy.learn_mode.forward(as_tree(batch))
    return {k: v.tolist() for k, v in policy.learn_mode.state_dict()["model"].items()}


def sequences(policy, n, seed):
    """Columns ``[5, n, …]`` for R2D2 and the decision transformer, with padding at the ends."""
    generator = torch.Generator().manual_seed(seed)
    lead = (5, n)
    ends = torch.randint(1, 6, (n,), generator=generator)
    columns = {
        "obs": torch.randn(*lead, 4, generator=generator),
        "next_obs": torch.randn(*lead, 4, generator=generator),
        "action": torch.randint(2, lead, generator=generator),
        "prev_action": torch.randint(2, lead, generator=generator),
        "reward": torch.randn(lead, generator=generator),
        "prev_reward": torch.randn(lead, generator=generator),
        "return_to_go": torch.randn(lead, generator=generator),
        "timestep": torch.arange(5)[:, None].expand(lead),
        "terminated": torch.zeros(lead, dtype=torch.bool),
        "is_first": torch.zeros(lead, dtype=torch.bool),
        "mask": torch.arange(5)[:, None] < ends,
    }
    if policy is R2D2Policy:
        return {**columns, "state": torch.zeros(5, n, 2 * 8)}
    return columns


def team_rows(policy, n, seed):
    """Rows of two agents, of which the second takes part in few of the first rows."""
    one = ppo_rows(2 * n, seed)
    columns = {name: column.unflatten(0, (n, 2)) for name, column in one.items()}
    present = torch.ones(n, 2, dtype=torch.int8)
    present[: n - 2, 1] = 0
    return {**columns, "obs": {"agents": columns["obs"], "agent_mask": present}}


MASKED = {
    R2D2Policy: (sequences, {**SMALL, "hidden_size": 8}, {"burn_in": 1}),
    DecisionTransformerPolicy: (
        sequences,
        {"obs_shape": 4, "action_shape": 2, "context_length": 5, "embed_size": 8, "dropout": 0.0},
        {"obs_norm": False, "return_scale": 1.0},
    ),
    IPPOPolicy: (
        team_rows,
        {"obs_shape": {"agents": 4}, "action_shape": 2, "n_agent": 2},
        {"adv_norm": False, "target_kl": 100.0},
    ),
}


def train_masked(cls, rank, split=None):
    """Learn from batches of which some rows do not count, and not equally many on each rank."""
    make_rows, model, options = MASKED[cls]
    policy = cls({"model": model, "seed": 0, "multi_gpu": split is not None, **options})
    for seed in range(3):
        batch, width = make_rows(cls, 8, seed), 0 if cls is IPPOPolicy else 1
        if split is not None:
            own = (slice(0, split) if rank == 0 else slice(split, 8),)
            own = (slice(None),) * width + own
            batch = to_dict(map_leaves(lambda leaf, own=own: leaf[own], as_tree(batch)))
        if "state" in batch:
            batch["state"] = batch["state"][0]
        policy.learn_mode.forward(as_tree(batch))
    state = policy.learn_mode.state_dict()
    largest = state["acting"].get("largest_return", {})
    return {name: value.tolist() for name, value in {**state["model"], **largest}.items()}


def team_batch(n, seed):
    return team_rows(IPPOPolicy, n, seed)


VALUES = {"obs_norm": True, "value_norm": True, "adv_norm": True}
TEAM = MASKED[IPPOPolicy][1]
NORMALIZED = {
    "dqn": (DQNPolicy, rows, SMALL, {"obs_norm": True, **LEARN}),
    "ppo": (
        PPOPolicy,
        ppo_rows,
        SMALL,
        {**VALUES, "reward_norm": True, "target_kl": 100.0, **LEARN},
    ),
    "a2c": (A2CPolicy, ppo_rows, SMALL, {**VALUES, "optimizer_eps": 0.1}),
    "ppg": (PPGPolicy, ppo_rows, SMALL, {**VALUES, "batch_size": 1000, "aux_freq": 3, **LEARN}),
    "ippo": (IPPOPolicy, team_batch, TEAM, {**VALUES, **LEARN}),
}


def see(policy, batch):
    """Act on observations, and take the rewards and returns of a batch into the statistics."""
    policy.collect_mode.forward(batch["obs"])
    if "ret" in batch:
        spec = policy.learn_mode.spec
        n_rows = len(batch["ret"])
        episodes = {"episode_id": torch.zeros(n_rows, dtype=torch.int64)}
        scaled = spec.scale_rewards(
            as_tree({"reward": batch["ret"], "done": torch.ones(n_rows) > 0, **episodes})
        )
        spec.observe_returns(batch["ret"], batch["obs"])
        return {**batch, "adv": batch["adv"] + scaled}
    return batch


def train_normalized(name, rank, split=None, *, stops=False, **further):
    """Learn from 8 batches of 16 rows of which each rank sees a part, with all statistics."""
    cls, make_rows, model, options = NORMALIZED[name]
    cfg = {"model": model, "seed": 0, "multi_gpu": split is not None, **options, **further}
    policy = cls(cfg)
    for seed in range(8):
        # Observations and returns that are far from mean 0, and not alike.
        batch = map_leaves(
            lambda leaf, seed=seed: leaf * 3 + seed if leaf.is_floating_point() else leaf,
            as_tree(make_rows(16, seed)),
        )
        if split is not None:
            own = slice(0, split) if rank == 0 else slice(split, 16)
            batch = map_leaves(lambda leaf, own=own: leaf[own], batch)
        batch = see(policy, to_dict(batch))
        if stops and seed == 4:
            state = policy.learn_mode.state_dict()
            policy = cls(cfg)
            policy.learn_mode.load_state_dict(state)
        policy.learn_mode.forward(as_tree(batch))
    state = policy.learn_mode.state_dict()
    normalizers = {
        f"{name} {kind}": state["acting"][name][kind]
        for name in ("return_stats",)
        if name in state["acting"]
        for kind in ("mean", "var")
    }
    obs = policy.obs_norm(as_tree(make_rows(16, 0))["obs"])
    normalizers["obs"] = obs["agents"] if name == "ippo" else obs
    return {k: v.tolist() for k, v in {**state["model"], **normalizers}.items()}


def train_compiled(rank, *, names, backend):
    """Return what the ranks learn without and with a compiler."""
    torch.compile = partial(torch.compile, backend=backend)  # the process ends with this job
    return {
        name: [train_normalized(name, rank, split=11, compile=compile) for compile in (False, True)]
        for name in names
    }


def collect_by_trajectory(rank):
    policy = PPOPolicy({"model": SMALL, "multi_gpu": True, "reward_norm": True})
    try:
        classic.as_collect_mode(policy, user="SampleSerialCollector")
    except ConfigError as error:
        return str(error)
    return "collects"


def sum_and_gather(rank):
    assert rank_and_world_size() == (rank, WORLD)
    assert sum_over_ranks([1.5, rank]) == [3.0, 1.0]
    return gather_from_ranks({"rank": rank, "text": "é" * (rank + 1), "none": None})


JOBS = {
    "dqn 32+32": lambda rank: train_long("dqn", rank, 32),
    "dqn 40+24": lambda rank: train_long("dqn", rank, 40),
    "ppo 32+32": lambda rank: train_long("ppo", rank, 32),
    "ppo 40+24": lambda rank: train_long("ppo", rank, 40),
    "ppg 32+32": lambda rank: train_long("ppg", rank, 32),
    "ppg 40+24": lambda rank: train_long("ppg", rank, 40),
    **{cls: partial(train_masked, cls, split=5) for cls in MASKED},
    **{f"{name} normalized": partial(train_normalized, name, split=11) for name in NORMALIZED},
    **{
        f"{name} stopped": partial(train_normalized, name, split=11, stops=True)
        for name in ("dqn", "ppo")
    },
    "trajectories": collect_by_trajectory,
    "gather": sum_and_gather,
    "half": lambda rank: train_half(rank, overlap=False),
    "half overlapping": lambda rank: train_half(rank, overlap=True),
    "heads": lambda rank: train_heads(rank, overlap=False),
    "heads overlapping": lambda rank: train_heads(rank, overlap=True),
    "out of order": train_out_of_order,
    "nan": meet_nan,
    "kl": stop_on_kl,
}


def do_jobs(rank):
    return {name: job(rank) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def ranks():
    """What both ranks answer to every job: ``answers[job] == [rank 0's, rank 1's]``."""
    answers = run_ranks(do_jobs)
    return {name: [answer[name] for answer in answers] for name in JOBS}


@pytest.mark.process
@pytest.mark.parametrize("job", ["half", "half overlapping"])
def test_two_ranks_learn_what_one_learns_from_the_whole_batch(ranks, job):
    first, second = ranks[job]
    assert first == second
    alone = DQNPolicy({"model": SMALL, **LEARN, "seed": 0})
    for seed in range(5):
        alone.learn_mode.forward(as_tree(rows(32, seed)))
    for name, value in alone.learn_mode.state_dict()["model"].items():
        torch.testing.assert_close(torch.tensor(first[name]), value, rtol=1e-5, atol=1e-7)


@pytest.mark.process
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("split", ["32+32", "40+24"])
def test_100_updates_of_two_ranks_equal_those_of_one_process_with_the_whole_batches(
    ranks, name, split
):
    first, second = ranks[f"{name} {split}"]
    assert first == second
    for parameter, value in train_long(name, rank=None).items():
        torch.testing.assert_close(
            torch.tensor(first[parameter]), torch.tensor(value), rtol=0, atol=1e-6
        )


@pytest.mark.process
@pytest.mark.parametrize("cls", MASKED)
def test_ranks_weigh_their_batches_by_the_rows_that_count(ranks, cls):
    first, second = ranks[cls]
    assert first == second
    for name, value in train_masked(cls, rank=None).items():
        torch.testing.assert_close(
            torch.tensor(first[name]), torch.tensor(value), rtol=1e-4, atol=1e-6
        )


@pytest.mark.process
@pytest.mark.parametrize("name", NORMALIZED)
def test_ranks_normalize_by_what_all_of_them_see(ranks, name):
    first, second = ranks[f"{name} normalized"]
    assert first == second
    for parameter, value in train_normalized(name, rank=None).items():
        torch.testing.assert_close(
            torch.tensor(first[parameter]), torch.tensor(value), rtol=1e-5, atol=1e-6
        )


@pytest.mark.process
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_ranks_that_resume_have_the_statistics_of_those_that_never_stopped(ranks, name):
    assert ranks[f"{name} stopped"] == ranks[f"{name} normalized"]


@pytest.mark.process
def test_workers_that_scale_rewards_by_trajectory_refuse_several_ranks(ranks):
    for message in ranks["trajectories"]:
        assert message.startswith("reward_norm must be False: ")


@pytest.mark.compiled
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "backend"), [(["ppo", "ppg", "ippo"], "aot_eager"), (["dqn"], "inductor")]
)
def test_ranks_that_compile_learn_what_they_learn_without(names, backend):
    job = partial(train_compiled, names=names, backend=backend)
    first, second = run_ranks(job, deadline_s=540)
    assert first == second
    for name in names:
        eager, compiled = first[name]
        for parameter, value in eager.items():
            torch.testing.assert_close(
                torch.tensor(compiled[parameter]), torch.tensor(value), rtol=1e-5, atol=1e-6
            )


@pytest.mark.process
def test_ranks_sum_numbers_and_gather_plain_values(ranks):
    expected = [
        {"rank": 0, "text": "é", "none": None},
        {"rank": 1, "text": "éé", "none": None},
    ]
    assert ranks["gather"] == [expected, expected]


@pytest.mark.process
@pytest.mark.parametrize("job", ["heads", "heads overlapping"])
def test_parameters_without_a_gradient_take_part_with_zeros(ranks, job):
    (norms, first), (other_norms, second) = ranks[job]
    assert norms == other_norms == [True, True]
    assert first == second


@pytest.mark.process
def test_reductions_that_overlap_wait_for_gradients_that_come_out_of_order(ranks):
    first, second = ranks["out of order"]
    assert first == second
    for name, value in train_out_of_order(None).items():
        torch.testing.assert_close(
            torch.tensor(first[name]), torch.tensor(value), rtol=1e-5, atol=1e-7
        )


@pytest.mark.process
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(ranks):
    assert ranks["nan"] == ["refused", "refused"]


@pytest.mark.process
def test_all_ranks_stop_when_one_has_moved_too_far(ranks):
    assert ranks["kl"] == [True, True]


def test_several_ranks_need_a_process_group():
    with pytest.raises(ConfigError, match="torchrun"):
        DQNPolicy({"model": SMALL, "multi_gpu": True})


def test_alone_there_is_nothing_to_average():
    class Acting(classic.Policy):
        def _forward_eval(self, data):
            return {}

    policy = Acting(model=torch.nn.Linear(2, 1), enable_field=["eval"])
    policy.sync_gradients(policy.model)
