"""Seeds: derived from the run's seed and the scope of the generator."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.seeding import derive_seed, seed_libraries
from middleware import Role

scopes = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4).map(tuple)


@given(st.integers(0, 2**63), scopes)
def test_a_scope_always_has_the_same_seed_which_every_library_accepts(run_seed, scope):
    seed = derive_seed(run_seed, *scope)
    assert seed == derive_seed(run_seed, *scope)
    assert 0 <= seed < 2**31


def test_seeds_do_not_depend_on_the_process_or_the_version():
    assert derive_seed(0, "collector", 0, 3) == 79_463_169
    assert derive_seed(1) == 2_093_793_397


def test_different_scopes_have_different_seeds():
    places = [(role, node, env) for role in "abc" for node in range(20) for env in range(50)]
    seeds = {derive_seed(0, *place) for place in places}
    assert len(seeds) == len(places)
    assert derive_seed(0, "a") != derive_seed(1, "a")
    assert derive_seed(0, "1") != derive_seed(0, 1)
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")


def test_equal_arguments_are_the_same_scope():
    assert derive_seed(0, Role.COLLECTOR, np.int64(3)) == derive_seed(0, "collector", 3)


def draw():
    return random.random(), np.random.rand()


def test_the_libraries_draw_the_same_numbers_after_the_same_seed():
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        seed_libraries(7)
        first = draw()
        seed_libraries(7)
        assert draw() == first
        seed_libraries(8)
        assert draw() != first
        seed_libraries(2**40)  # more than numpy takes
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


@pytest.mark.process
def test_torch_is_seeded_if_it_is_imported_and_never_imported_for_it():
    program = """
import sys
import dmiddleware.pipeline
from dmiddleware.seeding import seed_libraries
seed_libraries(7)
assert "torch" not in sys.modules
import torch
seed_libraries(7)
first = torch.rand(3)
seed_libraries(7)
assert torch.equal(torch.rand(3), first)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
