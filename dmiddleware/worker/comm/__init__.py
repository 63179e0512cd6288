"""How the coordinator and its workers communicate: links, stores, and the communicating workers."""
