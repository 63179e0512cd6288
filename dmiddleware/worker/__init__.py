"""The worker package."""
