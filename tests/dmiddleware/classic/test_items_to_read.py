"""Items of a deque buffer that a learner reads."""

from dmiddleware.classic import DequeBuffer


def test_items_that_are_only_read_are_those_that_a_sample_would_draw():
    buffers = [DequeBuffer(20, seed=3) for _ in range(2)]
    for buffer in buffers:
        for number in range(30):
            buffer.push({"x": number})
        buffer.delete([12, 25])
    for _ in range(5):
        drawn = buffers[0].drawn_to_read(6)
        assert [item.index for item in drawn] == [item.index for item in buffers[1].sample(6)]
    assert buffers[0].drawn_to_read(19) is None  # too few, which sample() says


def test_who_changes_samples_sees_those_of_a_learner():
    class Doubled(DequeBuffer):
        def sample(self, *args, **kwargs):
            return [*super().sample(*args, **kwargs)][:1]

    seen = []

    def watch(action, chain, *args, **kwargs):
        seen.append(action)
        return chain(*args, **kwargs)

    for buffer in (Doubled(20, seed=3), DequeBuffer(20, seed=3).use(watch)):
        for number in range(10):
            buffer.push({"x": number})
        assert buffer.drawn_to_read(6) is None
    assert seen == ["push"] * 10
