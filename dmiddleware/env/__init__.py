"""The env package."""
