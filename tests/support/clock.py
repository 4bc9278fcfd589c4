"""Time that stands still until a test moves it."""


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now
