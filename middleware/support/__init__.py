"""Helpers that several stock middleware share."""
