"""The rl package."""
