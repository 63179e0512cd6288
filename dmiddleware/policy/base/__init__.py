"""What every policy is built from: the base classes, their modes and styles."""
