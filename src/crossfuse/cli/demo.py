"""`crossfuse demo`."""


def demo() -> None:
    pass
