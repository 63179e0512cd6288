"""Transports: ordered streams of bytes between two processes, and the frames in them."""
