"""What the tests of the examples share."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.dmiddleware.env.optional import needed

# The examples are not an installed package; they run from the root of the repository.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

torch.set_num_threads(1)


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
        result = CliRunner().invoke(
            make_offline_data.command, ["Pendulum-v1"], catch_exceptions=False
        )
        assert result.exit_code == 0
    return folder
