import pytest
import torch

from dmiddleware.errors import CheckpointMismatch
from dmiddleware.policy.obs_norm import ObsNorm
from dmiddleware.tree import as_tree


def test_early_statistics_are_used_at_once():
    normalizer = ObsNorm(2)
    obs = torch.tensor([[0.0, 10.0], [2.0, 30.0]])
    normalizer.update(obs)
    torch.testing.assert_close(normalizer(obs), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_held_statistics_change_only_when_the_first_new_observations_come():
    normalizer = ObsNorm(1)
    probe = torch.tensor([[7.0]])
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    normalizer.hold()
    first = normalizer(probe)
    normalizer.hold()
    assert torch.equal(normalizer(probe), first)
    # Publishes what came before, which is what is in use already.
    normalizer.update(torch.full((10, 1), 50.0))
    assert torch.equal(normalizer(probe), first)
    normalizer.update(torch.full((10, 1), 60.0))
    assert torch.equal(normalizer(probe), first)
    normalizer.hold()
    assert torch.equal(normalizer(probe), first)
    normalizer.update(probe)
    assert not torch.equal(normalizer(probe), first)


def test_statistics_are_published_without_a_way_through_the_cpu(monkeypatch):
    normalizer = ObsNorm(1)

    def fail(tensor):
        raise AssertionError("a tensor was moved to the CPU")

    monkeypatch.setattr(torch.Tensor, "cpu", fail)
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    assert normalizer(torch.tensor([[2.0]])).item() == pytest.approx(1.0)


def test_results_are_clipped():
    normalizer = ObsNorm(1, clip=3.0)
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    assert normalizer(torch.tensor([[100.0], [-100.0]])).flatten().tolist() == [3.0, -3.0]


def test_one_hot_integers_pass_nested_numbers_are_normalized():
    normalizer = ObsNorm({"kind": ("one_hot", 4), "in": {"v": 2}})
    obs = as_tree(
        {
            "kind": torch.tensor([1, 3]),
            "in": {"v": torch.tensor([[0.0, 0.0], [4.0, 2.0]])},
        }
    )
    normalizer.update(obs)
    seen = normalizer(obs)
    assert seen["kind"] is obs["kind"]
    torch.testing.assert_close(seen["in"]["v"], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_each_pixel_of_an_image_is_normalized():
    normalizer = ObsNorm((1, 2, 2))
    images = torch.tensor([[[[0, 10], [20, 7]]], [[[2, 14], [28, 9]]]], dtype=torch.uint8)
    normalizer.update(images)
    expected = torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    torch.testing.assert_close(normalizer(images), expected)


def test_a_plain_dictionary_is_normalized_like_a_batch():
    normalizer = ObsNorm({"in": {"v": 1}})
    obs = {"in": {"v": torch.tensor([[0.0], [4.0]])}}
    assert not normalizer.has_seen_all
    normalizer.update(obs)
    assert normalizer.has_seen_all
    assert normalizer(obs)["in"]["v"].flatten().tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("moment", ["fresh", "learned", "collecting", "learned again"])
def test_a_restored_normalizer_continues_identically(moment):
    ours, theirs = ObsNorm(2), ObsNorm(2)
    ours.update(torch.randn(5, 2))
    if moment != "fresh":
        ours.hold()
    if moment in ("collecting", "learned again"):
        ours.update(torch.randn(5, 2))
    if moment == "learned again":
        ours.hold()
    theirs.load_state_dict(ours.state_dict())
    probe = torch.randn(4, 2)
    assert torch.equal(ours(probe), theirs(probe))
    for hold in (False, False, True, False):
        for normalizer in (ours, theirs):
            if hold:
                normalizer.hold()
            normalizer.update(probe)
        assert torch.equal(ours(probe), theirs(probe))


def test_a_state_of_other_observations_is_rejected():
    with pytest.raises(CheckpointMismatch, match="normalizes the observations"):
        ObsNorm({"a": 2}).load_state_dict(ObsNorm({"b": 2}).state_dict())
