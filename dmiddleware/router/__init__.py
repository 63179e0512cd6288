"""The router: events between processes and hosts, lossless, ordered and authenticated."""
