"""The router's runtime: the threads, locks and timeouts around the protocol."""
