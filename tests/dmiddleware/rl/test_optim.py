import copy

import pytest
import torch

from dmiddleware.rl.optim import FusedAdam, FusedAdamW, RMSprop

pytestmark = pytest.mark.usefixtures("either_torch")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(model, optimizer, n, start=0):
    for seed in range(start, start + n):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        make_step(model, optimizer)


def make_step(model, optimizer):
    """Step as an update does if it is one of ours."""
    if isinstance(optimizer, FusedAdam):
        optimizer.apply([parameter.grad for parameter in model.parameters()], torch.zeros(()))
    else:
        optimizer.step()


def assert_same(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def pair():
    ours, theirs = network(), network()
    return (
        ours,
        FusedAdam(ours.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-5),
        theirs,
        torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.8, 0.95), eps=1e-5, fused=True),
    )


def test_the_numbers_are_those_of_adam(pair):
    ours, fast, theirs, plain = pair
    train(ours, fast, 20)
    train(theirs, plain, 20)
    assert_same(ours, theirs)


def test_a_changed_learning_rate_counts_from_the_next_step(pair):
    ours, fast, theirs, plain = pair
    for model, optimizer in ((ours, fast), (theirs, plain)):
        train(model, optimizer, 5)
        optimizer.param_groups[0]["lr"] = 0.3
        train(model, optimizer, 5)
    assert_same(ours, theirs)


@pytest.mark.parametrize("direction", ["to plain", "from plain"])
def test_states_are_exchanged_with_adam(pair, direction):
    ours, fast, theirs, plain = pair
    # The receiver has a history of its own, which it must forget.
    train(ours, fast, 7)
    train(theirs, plain, 4, start=50)
    if direction == "to plain":
        theirs.load_state_dict(ours.state_dict())
        plain.load_state_dict(copy.deepcopy(fast.state_dict()))
    else:
        ours.load_state_dict(theirs.state_dict())
        fast.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(ours, fast, 7)
    train(theirs, plain, 7)
    assert_same(ours, theirs)


def test_a_parameter_without_gradient_is_left_alone(pair):
    ours, fast, theirs, plain = pair
    for model, optimizer in ((ours, fast), (theirs, plain)):
        train(model, optimizer, 3)
        optimizer.zero_grad()
        model[0](torch.ones(1, 3)).sum().backward()
        make_step(model, optimizer)
        train(model, optimizer, 3)
    assert_same(ours, theirs)
    counts = [slots["step"].item() for slots in fast.state_dict()["state"].values()]
    assert counts == [7, 7, 6, 6]


def test_a_group_that_is_added_is_trained_with_its_own_rate(pair):
    ours, fast, theirs, plain = pair
    for model, optimizer in ((ours, fast), (theirs, plain)):
        train(model, optimizer, 3)
        extra = torch.nn.Linear(2, 2)
        with torch.no_grad():
            extra.weight.fill_(0.5)
            extra.bias.fill_(0.1)
        optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
        model.append(extra)
        train(model, optimizer, 4)
    assert_same(ours, theirs)


def test_a_closure_is_evaluated(pair):
    ours, fast, _, _ = pair

    def closure():
        fast.zero_grad()
        loss = ours(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert fast.step(closure).item() > fast.step(closure).item()


def test_gradients_are_dropped_or_zeroed(pair):
    ours, fast, _, _ = pair
    train(ours, fast, 1)
    fast.zero_grad(set_to_none=False)
    assert all(bool((p.grad == 0).all()) for p in ours.parameters())
    fast.zero_grad()
    assert all(p.grad is None for p in ours.parameters())


def test_ordinary_steps_and_those_of_an_update_share_their_state(pair):
    ours, fast, theirs, plain = pair
    train(ours, fast, 3)
    train(theirs, plain, 3)
    for model, optimizer in ((ours, fast), (theirs, plain)):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
    train(ours, fast, 3)
    train(theirs, plain, 3)
    assert_same(ours, theirs)


@pytest.mark.parametrize("has_unused", [False, True])
@pytest.mark.parametrize("n_before", [0, 3])
def test_a_skipped_step_changes_nothing_and_is_not_counted(pair, n_before, has_unused):
    ours, fast, *_ = pair
    train(ours, fast, n_before)
    before = copy.deepcopy((list(ours.parameters()), fast.state_dict()["state"]))
    gradients = [torch.full_like(parameter, float("nan")) for parameter in ours.parameters()]
    if has_unused:
        gradients[1] = None
    fast.apply(gradients, torch.ones(()))
    parameters, state = before
    assert all(map(torch.equal, ours.parameters(), parameters))
    after = fast.state_dict()["state"]
    for n, slots in state.items():
        assert all(torch.equal(after[n][name], value) for name, value in slots.items()), n


def test_a_copy_has_its_own_state(pair):
    ours, fast, theirs, plain = pair
    train(ours, fast, 3)
    train(theirs, plain, 3)
    twin, optimizer = copy.deepcopy((ours, fast))
    train(ours, fast, 3)
    train(twin, optimizer, 3)
    train(theirs, plain, 3)
    assert_same(ours, theirs)
    assert_same(twin, theirs)


@pytest.mark.parametrize("first_steps", [0, 3])
def test_a_grad_scaler_unscales_gradients_and_skips_infinite_ones(pair, first_steps):
    ours, fast, theirs, plain = pair
    for model, optimizer in ((ours, fast), (theirs, plain)):
        train(model, optimizer, first_steps)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.full((5, 3), float(step))).square().mean()
            if step in (2, 3):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert_same(ours, theirs)
    steps = [int(state["step"]) for state in fast.state_dict()["state"].values()]
    assert set(steps) == {first_steps + 4}, "a skipped step is not counted"


def rmsprop():
    model = network()
    return model, RMSprop(model.parameters(), lr=0.01, decay=0.9, eps=1e-4)


@pytest.mark.parametrize("n_before", [0, 3])
def test_a_compiled_step_that_is_skipped_changes_nothing(n_before):
    model = network()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    train(model, optimizer, n_before)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [torch.full_like(parameter, float("nan")) for parameter in model.parameters()]
    step = torch.compile(optimizer.apply, backend="eager")
    step(gradients, torch.ones(()))
    assert all(map(torch.equal, model.parameters(), before))


def test_rmsprop_is_that_of_the_paper():
    model, optimizer = rmsprop()
    twin = network()
    squares = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    for seed in range(10):
        train(model, optimizer, 1, start=seed)
        gradients = [parameter.grad for parameter in model.parameters()]
        for parameter, gradient, square in zip(twin.parameters(), gradients, squares, strict=True):
            square.mul_(0.9).add_(0.1 * gradient.square())
            parameter.data.sub_(0.01 * gradient / (square + 1e-4).sqrt())
    for ours, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rmsprop_changes_nothing_if_a_gradient_is_not_finite(bad):
    model, optimizer = rmsprop()
    train(model, optimizer, 3)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))
    gradients = [torch.full_like(parameter, bad) for parameter in model.parameters()]
    optimizer.apply(gradients, torch.ones(()))
    parameters, state = before
    assert all(map(torch.equal, model.parameters(), parameters))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[n]["square_avg"], state[n]["square_avg"]) for n in state)


def test_rmsprop_leaves_an_unused_parameter_alone():
    model, optimizer = rmsprop()
    before = model[2].weight.detach().clone()
    first, *others = model.parameters()
    optimizer.apply([torch.ones_like(first), *(None for _ in others)], torch.zeros(()))
    assert torch.equal(model[2].weight, before)
    assert not torch.equal(first, network()[0].weight)


def test_rmsprop_continues_from_a_saved_state():
    model, optimizer = rmsprop()
    other, resumed = rmsprop()
    train(other, resumed, 2, start=30)
    train(model, optimizer, 4)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (other, resumed)):
        own.param_groups[0]["lr"] = 0.3
        own.follow_schedule()
        train(each, own, 3, start=4)
    assert_same(model, other)


def adamw_pair():
    ours, theirs = network(), network()
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3}
    return (
        (ours, FusedAdamW(ours.parameters(), **options)),
        (theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **options)),
    )


def test_the_numbers_are_those_of_adamw():
    (ours, fast), (theirs, plain) = adamw_pair()
    train(ours, fast, 10)
    train(theirs, plain, 10)
    fast.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(ours, fast, 10, start=10)
    train(theirs, plain, 10, start=10)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adamw_takes_nothing_away_in_a_skipped_step_or_without_a_gradient():
    (model, optimizer), _ = adamw_pair()
    train(model, optimizer, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    optimizer.apply(gradients, torch.ones(()))
    optimizer.apply([None, *gradients[1:]], torch.zeros(()))
    after = list(model.parameters())
    assert torch.equal(after[0], before[0])
    optimizer.apply([None] * len(gradients), torch.zeros(()))
    assert not torch.equal(after[1], before[1])
