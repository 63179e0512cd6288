"""The dmiddleware package."""
