import pytest

from tests.middleware.classic.router_nodes import Nodes


@pytest.fixture
def nodes(tmp_path_factory):
    # The path of a socket is short.
    nodes = Nodes(tmp_path_factory.mktemp("n"))
    yield nodes
    nodes.close()
