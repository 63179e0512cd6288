"""A clock that tests move."""


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now
