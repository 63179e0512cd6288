"""The evaluator package."""
