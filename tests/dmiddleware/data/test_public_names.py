import dmiddleware.data as data

NAMES = """
TensorBufferSettings HindsightReplaySettings UniformSamplerSettings PrioritySamplerSettings
Batch Nested as_tree from_numpy to_numpy to_dict to_device leaves nest map_leaves
lead_shape flatten_lead index_rows cat stack
ReplayBuffer TensorBuffer SampleTransform
Sampler Eligible UniformSampler PrioritySampler
BlockFolder check_saveable convert_checkpoint load_checkpoint save_checkpoint pack_checkpoint
unpack_checkpoint
OfflineDataset Minibatches load_rows save_dataset load_minari save_minari
MinibatchUnit minibatches n_minibatches select_columns
HindsightReplay GoalFunction
MixedReplay MixedReplaySettings
"""


def test_the_public_names_are_these():
    assert sorted(data.__all__) == sorted(NAMES.split())
    for name in data.__all__:
        assert getattr(data, name) is not None
