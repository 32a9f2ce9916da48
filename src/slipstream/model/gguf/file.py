"""The GGUF container: a header of typed fields, a table of tensors, and their data, usually quantised.

The header is read here and not with the `gguf` package, whose reader believes every count it finds: one flipped bit in
an array's length keeps it busy for ever. The package does what is hard to get right, the arithmetic of some thirty
quantised types."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMS = 4
_LEAST_FIELD, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Bytes that one field, or one row of the table of tensors, takes at least."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table of tensors. `shape` is in the order of numpy, the reverse of the file's."""

    shape: tuple[int, ...]
    type: Any
    """A `gguf.GGMLQuantizationType`."""
    start: int
    stop: int
    """Bytes `[start, stop)` of the file."""


class GgufFile:
    """An open GGUF file. Everything that does not fit is a `ConfigError` that names the file and the field or tensor.

    file = GgufFile("model.gguf")
    file.integer("llama.block_count"); file.read("token_embd.weight")"""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._gguf = gguf_package()
        try:
            self._bytes = np.memmap(self.path, np.uint8, mode="r")
        except FileNotFoundError:
            raise ConfigError(f"{self.path} does not exist") from None
        except (OSError, ValueError) as error:  # a directory, no permission; an empty file
            raise ConfigError(f"{self.path} cannot be read as a GGUF file: {error}") from None
        header = _Header(self.path, self._bytes.data)
        num_tensors, num_fields = header.begin()
        self.fields: dict[str, Any] = {}
        for _ in range(header.count(num_fields, _LEAST_FIELD, "fields")):
            name = header.text("the name of a field")
            if name in self.fields:
                raise self.error(f"field {name} is there twice")
            self.fields[name] = header.value(name)
        rows = [header.tensor() for _ in range(header.count(num_tensors, _LEAST_TENSOR, "tensors"))]
        alignment = self.integer("general.alignment", 32)
        if alignment & (alignment - 1):
            raise self.error(f"field general.alignment is {alignment}, which is no power of two")
        data = -(-header.at // alignment) * alignment
        self.tensors: dict[str, Entry] = {}
        for name, shape, number, offset in rows:
            if name in self.tensors:
                raise self.error(f"tensor {name} is there twice")
            self.tensors[name] = self._entry(name, shape, number, data + offset)

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")

    # --- fields ---

    def has(self, name: str) -> bool:
        return name in self.fields

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        return self._field(name, int, default, lambda value: least <= value < 2**31, f"an integer of at least {least}")

    def number(self, name: str, default: float | None = None) -> float:
        """Positive and finite."""
        value = self._field(name, (int, float), default, lambda v: 0 < v < math.inf, "a positive number")
        return float(value)

    def string(self, name: str, default: str | None = None) -> str:
        return self._field(name, str, default, lambda _: True, "a text")

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._field(name, bool, default, lambda _: True, "true or false")

    def strings(self, name: str) -> list[str]:
        return self._field(name, list, None, lambda v: all(isinstance(text, str) for text in v), "an array of texts")

    def integers(self, name: str) -> list[int]:
        good = lambda v: all(isinstance(n, int) and not isinstance(n, bool) for n in v)  # noqa: E731
        return self._field(name, list, None, good, "an array of integers")

    def _field(self, name: str, kind: Any, default: Any, is_good: Any, expected: str) -> Any:
        """`default` is for an absent field; None means that the field must be there."""
        value = self.fields.get(name, default)
        if value is None:
            raise self.error(f"field {name} is missing; expected {expected}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not is_good(value):
            shown = repr(value)
            shown = shown if len(shown) < 80 else shown[:76] + " ..."
            raise self.error(f"field {name} is {shown}; expected {expected}")
        return value

    # --- tensors ---

    def _entry(self, name: str, shape: tuple[int, ...], number: int, start: int) -> Entry:
        sizes = self._gguf.GGML_QUANT_SIZES
        if number not in set(sizes):
            raise self.error(f"tensor {name} has type {number}, which this release of the gguf package does not know")
        kind = self._gguf.GGMLQuantizationType(number)
        block, block_bytes = sizes[kind]
        if shape[-1] % block:
            raise self.error(f"tensor {name} has rows of {shape[-1]}, but {kind.name} comes in blocks of {block}")
        stop = start + math.prod(shape) // block * block_bytes
        if stop > len(self._bytes):
            raise self.error(
                f"tensor {name} ends at byte {stop:,}, but the file has {len(self._bytes):,}: it is cut short, or damaged"
            )
        return Entry(shape, kind, start, stop)

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32."""
        entry = self.tensors[name]
        rows = self._bytes[entry.start : entry.stop].reshape(*entry.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # damaged scales overflow; the values are looked at below
                values = np.asarray(self._gguf.dequantize(np.asarray(rows), entry.type), np.float32)
        except NotImplementedError:
            raise self.error(
                f"tensor {name} is stored as {entry.type.name}, which the gguf package cannot dequantise; use another "
                "quantisation of the model, such as Q8_0"
            ) from None
        if not np.isfinite(values).all():
            raise self.error(f"tensor {name} holds values that are not finite: the file is damaged")
        return values.reshape(entry.shape)


class _Header:
    """Reads forward; never past the end, and never more than the file can hold."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path, self._data, self.at = path, data, 0

    def begin(self) -> tuple[int, int]:
        """The numbers of tensors and of fields."""
        if bytes(self._data[:4]) != _MAGIC:
            raise ConfigError(
                f"{self._path} is not a GGUF file: it begins with {bytes(self._data[:4])!r}, not {_MAGIC!r}"
            )
        self.at = 4
        version = self.scalar("<I", "the version")
        if version not in _VERSIONS:
            hint = "; it is for machines of the other byte order" if not version & 0xFFFF else ""
            raise self._error(f"its GGUF version is {version}, and 2 and 3 are known{hint}")
        return self.scalar("<Q", "the number of tensors"), self.scalar("<Q", "the number of fields")

    def count(self, number: int, least_bytes: int, what: str) -> int:
        if number * least_bytes > len(self._data) - self.at:
            raise self._error(
                f"it announces {number:,} {what}, more than it has bytes for: it is cut short, or damaged"
            )
        return number

    def scalar(self, form: str, what: str) -> Any:
        try:
            (value,) = struct.unpack_from(form, self._data, self.at)
        except struct.error:
            raise self._error(f"it ends inside {what}") from None
        self.at += struct.calcsize(form)
        return value

    def text(self, what: str) -> str:
        size = self.count(self.scalar("<Q", what), 1, f"bytes for {what}")
        raw = bytes(self._data[self.at : self.at + size])
        self.at += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def value(self, name: str) -> Any:
        what = f"field {name}"
        kind = self.scalar("<I", what)
        if kind != _ARRAY:
            return self._single(kind, what)
        kind, number = self.scalar("<I", what), self.scalar("<Q", what)
        if kind == _STRING:
            return [self.text(what) for _ in range(self.count(number, 8, f"texts in {what}"))]
        form = self._form(kind, what)
        self.count(number, struct.calcsize(form), f"values in {what}")
        values = list(struct.unpack_from(f"<{number}{form[1]}", self._data, self.at))
        self.at += number * struct.calcsize(form)
        return values

    def _single(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        value = self.scalar(self._form(kind, what), what)
        # 1e-5 was written as the nearest float32, and is to come back as 1e-5, not as 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _form(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            raise self._error(f"{what} has values of type {kind}, which is not known here")
        return _SCALARS[kind]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and offset from the beginning of the data."""
        name = self.text("the name of a tensor")
        what = f"tensor {name}"
        dims = self.scalar("<I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise self._error(f"{what} has {dims} dimensions; expected 1 to {_MAX_DIMS}")
        shape = tuple(reversed([self.scalar("<Q", what) for _ in range(dims)]))
        if 0 in shape:
            raise self._error(f"{what} is empty: its shape is {shape}")
        return name, shape, self.scalar("<I", what), self.scalar("<Q", what)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}")


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "reading GGUF files needs the gguf package: python -m pip install 'slipstream-rl[gguf]'"
        ) from None
    return gguf
