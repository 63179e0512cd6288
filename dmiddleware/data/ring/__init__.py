"""The storage under ``TensorBuffer``: preallocated columns used as a ring."""
