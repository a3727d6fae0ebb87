"""The one error of this package."""


class ConfigError(ValueError):
    """A configuration can't be used. The message holds one sentence a line, one line a mistake.

    Each sentence names the file (or `--set`), the dotted key, what was found and what was expected.
    """
