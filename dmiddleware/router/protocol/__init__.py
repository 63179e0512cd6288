"""The router's protocol: pure state machines, from the handshake to the topology.

No module here starts a thread, owns a socket or a file, or reads a clock. Frames, times and random
numbers are passed in; frames and changes are returned. ``test_pure_packages.py`` of the router's
tests checks the imports.
"""
