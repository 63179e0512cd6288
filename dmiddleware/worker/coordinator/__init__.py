"""The coordinator of the classic parallel mode, and the messages that it exchanges with workers."""
