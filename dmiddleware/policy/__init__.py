"""The policy package."""
