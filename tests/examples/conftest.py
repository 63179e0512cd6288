"""What the tests of the examples share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmiddleware.policy import Policy
from dmiddleware.policy.update import UpdateRunner
from dmiddleware.program import run_program
from tests.dmiddleware.env.optional import needed

# The examples are not an installed package; they run from the root of the repository.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def offline_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make small datasets of Pendulum once, and return the folder with them."""
    needed("minari")
    from examples import make_offline_data

    small = {"actor_hidden_sizes": [8], "critic_hidden_sizes": [8]}
    # Ten environments make one episode each.
    recipe = make_offline_data.Recipe(320, 256, 280, 2400, {"model": small})
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        patch.setitem(make_offline_data.RECIPES, "Pendulum-v1", recipe)
        run_program(make_offline_data.main, ["--env-id", "Pendulum-v1"])
    return folder


@pytest.fixture
def n_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Trace all updates as one graph each, and return how many graphs there have been.

    The traced code is not compiled, which would take minutes. All guards are checked, so a value
    that changes from one update to the next makes another graph.
    """
    import torch._dynamo  # takes longer than torch itself, and few tests need it

    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda update, **options: compiled(
            update, backend="eager", fullgraph=True, isolate_recompiles=True
        ),
    )
    make = UpdateRunner.__init__
    always = {"compiles": True}
    monkeypatch.setattr(
        UpdateRunner, "__init__", lambda *args, **given: make(*args, **{**given, **always})
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield lambda: counters["stats"]["unique_graphs"]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies treat the CPU as a GPU, whose numbers are read when they are asked for."""
    on_gpu = property(lambda policy: True, lambda policy, value: None)
    monkeypatch.setattr(Policy, "on_gpu", on_gpu, raising=False)
