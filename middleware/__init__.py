"""The middleware package."""
