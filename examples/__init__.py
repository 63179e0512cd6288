"""Runnable programs, each of which trains a policy: ``python -m examples.cartpole_dqn``."""

import warnings

# treevalue 1.5 registers its trees with torch through a deprecated function; users cannot fix that.
warnings.filterwarnings(
    "ignore", message=r"`torch\.utils\._pytree\._register_pytree_node`", category=FutureWarning
)
