"""The router's state machines. Pure: no socket, thread or clock."""
