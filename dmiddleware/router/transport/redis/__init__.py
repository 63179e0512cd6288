"""Requests and replies through a redis server, where nodes cannot reach each other directly.

A listener blocks on a list, its inbox; each request names the list that its reply goes to. Only the
redis server must be reachable.

Redis promises less than a socket does. It keeps everything in memory: after a restart, requests and
replies are lost, or, if it restores a snapshot, delivered twice. Requests without a reply fail at
their deadline, and the streams above send again whatever was not acknowledged and drop duplicates,
so nodes that live through the restart lose and duplicate nothing. Three weaknesses remain:

- The death of a peer is noticed when its heartbeats stop, after three seconds, not at once.
- While the redis server is down, all nodes wait for it, up to the emitters' deadlines.
- Anyone with access to the redis server can read the traffic and hold it up. They cannot forge or
  change it, because the run's key signs every byte of every frame.
"""

try:
    import redis  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "the redis transport needs redis-py; install it: pip install 'dmiddleware[redis]'"
    ) from missing

from dmiddleware.router.transport.redis.listener import RedisTransport

__all__ = ["RedisTransport"]
