"""The exception that the configuration package raises."""

from __future__ import annotations

from collections.abc import Iterable


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
        lines += [f"  {path}: {sentence}" if path else f"  {sentence}" for path, sentence in self.errors]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[tuple[str, str]], str | None]]:
        return type(self), (self.errors, self.origin)
