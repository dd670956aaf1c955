"""How an error of a worker is said to a person."""


def in_words(error: BaseException) -> str:
    """A worker's own error, without Ray's remote traceback around it."""
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, Exception) else error
    name = type(shown).__name__
    text = str(shown)
    return text if text.startswith(name) else f"{name}: {text}"
