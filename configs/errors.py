"""The one error of this package."""


class ConfigError(ValueError):
    """A configuration can't be used. The message has one sentence per error, each on its own line.

    Each sentence names the file (or `--set`), the dotted key, what was found and what was expected.
    """
