"""The base classes of policies, and what they are built from."""
