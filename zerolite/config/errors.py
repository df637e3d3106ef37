"""The exception that the configuration package raises."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """Escape what would steer a terminal: characters that are not printable, except for line ends."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text
    )


class ConfigError(ValueError):
    """All mistakes of a configuration, in one message.

    Attributes:
        errors: (JSON path, sentence) of each error. The path is "" if the error concerns the whole source.
        origin: path of the configuration file, or None.
    """

    def __init__(self, errors: Iterable[tuple[str, str]], origin: str | None = None) -> None:
        self.errors: list[tuple[str, str]] = list(dict.fromkeys(errors))
        self.origin = origin
        super().__init__(self._message())

    def _message(self) -> str:
        count = len(self.errors)
        where = f" {self.origin}" if self.origin else ""
        lines = [f"{count} error{'' if count == 1 else 's'} in the configuration{where}:"]
        for path, sentence in self.errors:
            key = printable(path).replace("\n", "\\n")
            lines.append(f"  {key}: {sentence}" if path else f"  {sentence}")
        return printable("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[tuple[str, str]], str | None]]:
        return type(self), (self.errors, self.origin)
