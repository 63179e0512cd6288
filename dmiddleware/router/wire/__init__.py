"""The wire format: from Python values to frames and back.

No module here starts a thread, owns a socket or a file, or reads a clock. ``test_pure_packages.py``
of the router's tests checks the imports.
"""
