"""The learner package."""
