"""Settings of another library, read field by field: every problem is kept, and all are told at once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..config import ModelConfig
from ..errors import ConfigError, ModelImportError

Value = TypeVar("Value")


class Settings:
    """Fields of the settings in `path`.

    Args:
        path: Named in errors.
        content: The fields by name; None counts as absent.
        inside: What stands before a field's name in errors, for a table within the file.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], inside: str = "") -> None:
        self._path = path
        self._content = {name: value for name, value in content.items() if value is not None}
        self._inside = inside
        self.problems: list[str] = []

    def need(self, name: str, kind: type[Value]) -> Value:
        """The field `name`, which must be there. After a problem the result must not be used: see `check`."""
        if name not in self._content:
            self.refuse(f"{self._inside}{name} is missing")
            return kind()
        return self._converted(name, kind)

    def get(self, name: str, kind: type[Value], default: Value) -> Value:
        """The field `name`, or `default` where it is absent."""
        return self._converted(name, kind) if name in self._content else default

    def choose(self, name: str, meanings: Mapping[str, Value]) -> Value:
        """What the field `name` means, which must be there."""
        value = self.need(name, str)
        if name in self._content and value not in meanings:
            self.refuse(f"{self._inside}{name} is {value!r}, supported: {', '.join(meanings)}")
        return meanings.get(value, next(iter(meanings.values())))

    def fixed(self, values: Mapping[str, object]) -> None:
        """Refuse any other value of these fields, which may be absent; None for a field that must be."""
        for name, only in values.items():
            value = self._content.get(name)
            if value is not None and (type(value) is not type(only) or value != only):
                wanted = "nothing" if only is None else _written(only)
                self.refuse(f"{self._inside}{name} is {_written(value)}, supported: {wanted}")

    def unknown(self, known: set[str]) -> None:
        """Refuse every field that is not `known`."""
        for name in self._content.keys() - known:
            self.refuse(f"{self._inside}{name} is not a setting, these are: {', '.join(sorted(known))}")

    def refuse(self, problem: str) -> None:
        """Keep `problem` for `check`."""
        self.problems.append(problem)

    def check(self) -> None:
        """Raise `ModelImportError` with all problems, if there are any."""
        if self.problems:
            raise ModelImportError(f"{self._path}: " + "; ".join(dict.fromkeys(self.problems)))

    def model(self, build: Callable[[], ModelConfig]) -> ModelConfig:
        """What `build` makes of the fields, whose contradictions are problems of this file."""
        self.check()
        try:
            return build()
        except ConfigError as error:
            raise ModelImportError(f"{self._path}: {error}") from None

    def _converted(self, name: str, kind: type[Value]) -> Value:
        value = self._content[name]
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            self.refuse(f"{self._inside}{name} is {_written(value)}, expected {kind.__name__}")
            return kind()


def _written(value: object) -> str:
    """`value` as JSON, as it stands in the file."""
    return msgspec.json.encode(value).decode()
