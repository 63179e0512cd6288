import numpy as np
import pytest
import torch

from dmiddleware.classic import as_collect_mode, as_eval_mode, collate
from dmiddleware.classic.collate import to_rows
from dmiddleware.env import make_env_manager
from dmiddleware.errors import PolicyError, PolicyOutputError, StructureError
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.tree import as_tree, with_columns


def collected(n_steps=6, n_envs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lead = (n_steps, n_envs)
    return as_tree(
        {
            "obs": torch.randn(*lead, 4, generator=generator),
            "reward": torch.randn(*lead, generator=generator),
            "done": torch.rand(lead, generator=generator) < 0.3,
        }
    )


def same(ours, theirs):
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-6)


def collecting(policy):
    return as_collect_mode(policy, user="test")


def test_the_base_class_determines_the_style(per_env, batched):
    assert collecting(batched).get_attribute("batched") is True
    assert collecting(per_env).get_attribute("batched") is False


def test_batched_calls_of_both_styles_agree(per_env, batched):
    obs, env_id = torch.randn(5, 4), np.array([4, 0, 2, 7, 1])
    ours = per_env.collect_mode.forward(obs, env_id=env_id, shift=1)
    same(ours, batched.collect_mode.forward(obs, env_id=env_id, shift=1))
    assert ours["action"].dtype == torch.int64
    same(per_env.eval_mode.forward(obs), batched.eval_mode.forward(obs))


def test_per_env_calls_of_both_styles_agree(per_env, batched):
    data = {7: torch.randn(4), 2: torch.randn(4)}
    ours = per_env.collect_mode.forward(data, shift=1)
    theirs = collecting(batched).forward(data, shift=1)
    assert list(ours) == list(theirs) == [7, 2]
    for env_id in data:
        same(ours[env_id], theirs[env_id])
    theirs = as_eval_mode(batched, user="test").forward(data)
    ours = per_env.eval_mode.forward(data)
    assert {i: int(o["action"]) for i, o in ours.items()} == {
        i: int(o["action"]) for i, o in theirs.items()
    }


def test_without_env_ids_envs_are_counted_from_0(batched):
    obs = torch.randn(3, 4)
    same(batched.collect_mode.forward(obs), batched.collect_mode.forward(obs, env_id=np.arange(3)))


def test_no_envs_get_no_outputs(per_env, batched):
    assert per_env.collect_mode.forward({}) == {}
    assert as_eval_mode(batched, user="test").forward({}) == {}


def test_observations_may_be_arrays_and_nested(small):
    model = {"obs_shape": {"a": 4, "b": 2}, "action_shape": 2, "encoder_hidden_sizes": [8]}
    policy = DQNPolicy({"model": model})
    obs = {"a": np.random.rand(3, 4).astype(np.float32), "b": np.ones((3, 2), np.float32)}
    whole = policy.eval_mode.forward(obs)["action"]
    assert torch.equal(policy.eval_mode.forward(as_tree(obs))["action"], whole)
    by_env = {i: {key: value[i] for key, value in obs.items()} for i in range(3)}
    answers = as_eval_mode(policy, user="test").forward(by_env)
    assert [int(answers[i]["action"]) for i in range(3)] == whole.tolist()


def test_train_samples_of_both_styles_agree_on_a_batch(per_env, batched):
    batch = collected()
    ours = per_env.collect_mode.get_train_sample(batch)
    same(ours, collecting(batched).get_train_sample(batch))
    assert ours["reward"].shape == (6, 3)
    assert not torch.equal(ours["reward"], batch["reward"])


def test_train_samples_of_both_styles_agree_on_a_list(per_env, batched):
    rows = to_rows(as_tree({key: leaf[:, 1] for key, leaf in collected().items()}))
    for row in rows[:-1]:
        row["done"] = torch.tensor(False)
    ours = per_env.collect_mode.get_train_sample(rows)
    theirs = collecting(batched).get_train_sample(rows)
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    same(collate(ours), collate(theirs))


def test_train_samples_of_both_styles_agree_on_an_episode(per_env, batched):
    episode = as_tree({key: leaf[:, 0] for key, leaf in collected().items()})
    ours = per_env.collect_mode.get_train_sample(episode)
    same(ours, collecting(batched).get_train_sample(episode))


def test_train_samples_of_uneven_number_come_in_one_dimension(per_env):
    class Halving(type(per_env)):
        def _get_train_sample(self, transitions):
            return transitions[::2]

    policy = Halving({}, model=per_env.model)
    batch = collected(5, 2)
    batch["done"][:] = torch.tensor(
        [[False, True], [False, False], [True, False], [False, False], [False, True]]
    )
    samples = policy.collect_mode.get_train_sample(batch)
    # Env 0: steps 0-2 and 3-4, env 1: step 0 and steps 1-4.
    wanted = [(0, 0), (2, 0), (3, 0), (0, 1), (1, 1), (3, 1)]
    assert torch.equal(samples["obs"], torch.stack([batch["obs"][t, e] for t, e in wanted]))


def test_a_new_episode_id_ends_a_trajectory_too(per_env):
    batch = collected(3, 1)
    batch["done"][:] = False
    batch["reward"][:] = 1.0
    batch = with_columns(batch, episode_id=torch.tensor([[1], [2], [2]]))
    samples = per_env.collect_mode.get_train_sample(batch)
    assert samples["reward"].flatten().tolist() == [1.0, 2.0, 1.0]


def test_by_default_training_samples_are_the_transitions(small):
    mode = collecting(DQNPolicy({"model": small}))
    batch = collected()
    rows = [{"obs": 1}]
    assert mode.get_train_sample(batch) is batch
    assert mode.get_train_sample(rows) is rows


@pytest.fixture
def timestep():
    """One step of three real envs."""
    with make_env_manager("CartPole-v1", env_num=3, seed=0) as envs:
        yield envs.step(np.array([0, 1, 0]))


def test_transitions_have_the_standard_columns_in_both_forms(small, timestep):
    mode = collecting(DQNPolicy({"model": small}))
    obs = torch.randn(3, 4)
    output = mode.forward(obs)
    whole = mode.process_transition(obs, output, timestep)
    singles = [
        mode.process_transition(obs[i], {key: value[i] for key, value in output.items()}, one)
        for i, one in enumerate(timestep)
    ]
    assert set(singles[0]) == {
        "obs",
        "next_obs",
        "action",
        "logit",
        "reward",
        "done",
        "terminated",
        "truncated",
    }
    same(whole, collate(singles))


def test_a_custom_process_transition_works_on_batches_too(per_env, timestep):
    class Marked(type(per_env)):
        def _process_transition(self, obs, policy_output, timestep):
            return {"obs": obs, "action": policy_output["action"], "mark": timestep.env_id}

    mode = Marked({}, model=per_env.model).collect_mode
    obs = torch.randn(3, 4)
    whole = mode.process_transition(obs, mode.forward(obs), timestep)
    assert whole["mark"].tolist() == [0, 1, 2]
    assert torch.equal(whole["obs"], obs)


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("_forward_collect", "write act_collect"),
        ("_forward_eval", "write act_eval"),
        ("_get_train_sample", "write train_batch"),
        ("_process_transition", "from act_collect"),
    ],
)
def test_a_per_env_method_in_a_batched_class_is_rejected(method, remedy, small):
    loud = type("Loud", (DQNPolicy,), {method: lambda self, data, **kwargs: data})
    with pytest.raises(PolicyError, match=rf"Loud defines {method}.*{remedy}"):
        collecting(loud({"model": small}))


@pytest.mark.parametrize("answer", [None, {}, {"logit": torch.zeros(2)}, torch.zeros(2)])
def test_a_batched_output_without_an_action_is_rejected(linear, batched, answer):
    class Wrong(type(batched)):
        def act_collect(self, obs, env_id, **kwargs):
            return answer

    mode = Wrong({}, model=linear()).collect_mode
    with pytest.raises(PolicyOutputError, match=r'Wrong\.act_collect returned .*"action"'):
        mode.forward(torch.zeros(2, 4))


@pytest.mark.parametrize("answer", [None, {0: None}, {0: {"logit": 1}}, {0: 1}, [1]])
def test_a_per_env_output_without_an_action_is_rejected(linear, per_env, answer):
    class Wrong(type(per_env)):
        def _forward_collect(self, data, **kwargs):
            return answer

    mode = Wrong({}, model=linear()).collect_mode
    for data in (torch.zeros(1, 4), {0: torch.zeros(4)}):
        with pytest.raises(PolicyOutputError, match=r'Wrong\._forward_collect returned .*"action"'):
            mode.forward(data)


@pytest.mark.parametrize("answer", [None, 0.5, [None]])
def test_learning_that_returns_no_dictionary_is_rejected(linear, batched, answer, transitions):
    class Wrong(type(batched)):
        def learn(self, batch):
            return answer

    with pytest.raises(PolicyOutputError, match=r"Wrong\.learn returned"):
        Wrong({}, model=linear()).learn_mode.forward(transitions())


def test_an_env_without_an_output_is_named(linear, per_env):
    class Forgetful(type(per_env)):
        def _forward_collect(self, data, **kwargs):
            return {0: {"action": 1}}

    mode = Forgetful({}, model=linear()).collect_mode
    with pytest.raises(PolicyError, match=r"no output for \[3\]"):
        mode.forward(torch.zeros(2, 4), env_id=np.array([0, 3]))


def test_outputs_that_differ_in_keys_are_rejected(linear, per_env):
    class Fickle(type(per_env)):
        def _forward_collect(self, data, **kwargs):
            return {i: {"action": 1} if i else {"action": 1, "extra": 2} for i in data}

    with pytest.raises(StructureError, match="extra"):
        Fickle({}, model=linear()).collect_mode.forward(torch.zeros(2, 4))


def test_both_styles_collect_the_same_numbers_in_real_envs(per_env, batched):
    def collect(policy):
        with make_env_manager("CartPole-v1", env_num=3, seed=5) as envs:
            collector = RolloutCollector(policy.collect_mode, envs)
            return [collector.collect(60, policy_kwargs={"shift": 1}) for _ in range(2)]

    for ours, theirs in zip(collect(per_env), collect(batched), strict=True):
        assert bool(ours["done"].any()), "an episode ended within the batch"
        for batch in (ours, theirs):
            del batch["episode_id"]  # unique, so no two runs have the same
        same(ours, theirs)
