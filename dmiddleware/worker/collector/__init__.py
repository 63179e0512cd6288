"""The collector package."""
