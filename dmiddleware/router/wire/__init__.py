"""The wire format: values to bytes and back. Pure: no socket, thread or clock."""
