"""The pipeline package."""
