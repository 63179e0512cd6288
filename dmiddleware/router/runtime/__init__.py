"""The router's threads: they move bytes between the protocol and a transport."""
