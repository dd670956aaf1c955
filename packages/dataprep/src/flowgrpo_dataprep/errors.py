"""What stops data preparation: where in the input, what is wrong there, what to do."""


class LineError(ValueError):
    """One line or row cannot be used. The reader that knows its place turns it into an InputError or skips it."""


class InputError(ValueError):
    """An input that cannot be used: file, line or row (0: the file as a whole), what is wrong, and the remedy."""

    def __init__(self, path: str, line: int, what: str, hint: str = ""):
        super().__init__(path, line, what, hint)  # pickle rebuilds from these
        self.path, self.line, self.what, self.hint = path, line, what, hint

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else self.path
        return f"{where}: {self.what}" + (f"\nhint: {self.hint}" if self.hint else "")


SKIP_HINT = "mend the line, or leave such lines out with --on-error skip"
