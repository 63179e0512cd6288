"""Runnable programs, each a whole training: ``python -m examples.cartpole_dqn``."""

import warnings

# treevalue 1.5 registers its trees with torch under an old name; users can do nothing about it.
warnings.filterwarnings(
    "ignore", message=r"`torch\.utils\._pytree\._register_pytree_node`", category=FutureWarning
)
