"""The GGUF container: typed metadata fields and tensors, usually quantized, read with the `gguf` package.

The package's reader trusts every length in the file: a single flipped bit can make it loop for hours. `_bounded_reader`
checks each read against the size of the file, and turns whatever the reader raises into a `ConfigError`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError

_MAX_DIMS = 4
_READER_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError)
"""What `gguf.GGUFReader` raises on a damaged file."""


class GgufFile:
    """An open GGUF file. Errors are `ConfigError`s that name the file and the field or tensor.

    file = GgufFile("model.gguf")
    file.integer("llama.block_count"); file.read("token_embd.weight")"""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._gguf = gguf_package()
        reader = self._open()
        if reader.endianess != self._gguf.GGUFEndian.LITTLE:
            raise self.error("it is big-endian; only little-endian GGUF files are supported")
        self.fields: dict[str, Any] = dict(reader.fields)
        """`gguf.ReaderField` by name."""
        self.tensors: dict[str, Any] = {}
        """`gguf.ReaderTensor` by name."""
        for tensor in reader.tensors:
            if tensor.name in self.tensors:
                raise self.error(f"tensor {tensor.name} appears twice")
            self.tensors[tensor.name] = tensor
            if not math.prod(shape := self.shape(tensor.name)) or not 1 <= len(shape) <= _MAX_DIMS:
                raise self.error(
                    f"tensor {tensor.name} has shape {shape}; expected 1 to {_MAX_DIMS} dimensions, none 0"
                )

    def _open(self) -> Any:
        try:
            return _bounded_reader(self._gguf)(self.path)
        except FileNotFoundError:
            raise ConfigError(f"{self.path} does not exist") from None
        except (OSError, *_READER_ERRORS) as error:  # a directory, no permission; an empty or damaged file
            raise ConfigError(f"{self.path} cannot be read as a GGUF file: {_text(error)}") from None

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")

    # --- fields ---

    def has(self, name: str) -> bool:
        return name in self.fields

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        return self._field(
            name, int, default, lambda value: minimum <= value < 2**31, f"an integer of at least {minimum}"
        )

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._field(name, (int, float), default, lambda v: 0 < v < math.inf, "a positive number")
        return float(value)

    def string(self, name: str, default: str | None = None) -> str:
        return self._field(name, str, default, lambda _: True, "a string")

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._field(name, bool, default, lambda _: True, "true or false")

    def strings(self, name: str) -> list[str]:
        return self._field(name, list, None, lambda v: all(isinstance(text, str) for text in v), "an array of strings")

    def integers(self, name: str) -> list[int]:
        def is_valid(values: list[Any]) -> bool:
            return all(isinstance(n, int) and not isinstance(n, bool) for n in values)

        return self._field(name, list, None, is_valid, "an array of integers")

    def _field(self, name: str, kind: Any, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """Return a field's value; `default` replaces an absent field, and None makes the field required."""
        value = self._value(name) if name in self.fields else default
        if value is None:
            raise self.error(f"field {name} is missing; expected {expected}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not is_valid(value):
            shown = repr(value)
            shown = shown if len(shown) < 80 else shown[:76] + " ..."
            raise self.error(f"field {name} is {shown}; expected {expected}")
        return value

    def _value(self, name: str) -> Any:
        field = self.fields[name]
        try:
            value = field.contents()
        except _READER_ERRORS as error:
            raise self.error(f"field {name} cannot be read: {_text(error)}") from None
        if list(field.types) == [self._gguf.GGUFValueType.FLOAT32]:
            return float(str(np.float32(value)))  # 1e-5 as written, not 9.999999747378752e-06
        return value

    # --- tensors ---

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in numpy's order, the reverse of the file's."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def read(self, name: str) -> np.ndarray:
        """Dequantize a tensor to float32."""
        tensor = self.tensors[name]
        try:
            with np.errstate(all="ignore"):  # damaged scales overflow; checked below
                values = np.asarray(self._gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type), np.float32)
        except NotImplementedError:
            raise self.error(
                f"tensor {name} is stored as {tensor.tensor_type.name}, which the gguf package cannot dequantize; use "
                "another quantization of the model, such as Q8_0"
            ) from None
        if not np.isfinite(values).all():
            raise self.error(f"tensor {name} holds values that are not finite: the file is damaged")
        return values.reshape(self.shape(name))


def _bounded_reader(gguf: Any) -> Any:
    """Return a `gguf.GGUFReader` class that never reads past the end of the file or loops over more than it holds."""

    class BoundedGgufReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self._check(int(offset) + np.dtype(dtype).itemsize * int(count))
            return super()._get(int(offset), dtype, int(count), override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            """Read an array of numbers in one piece: the package reads one at a time."""
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            dtype = self.gguf_scalar_to_np.get(kind[0])
            if dtype is None:
                self._check(orig_offs + int(length[0]))  # strings take at least 8 bytes each
                return super()._get_field_parts(orig_offs, raw_type)
            values = self._get(orig_offs + 12, dtype, length[0])
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
            return 12 + values.nbytes, [kind, length, values], [2], types

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            """Build tensors one at a time, so that an error names its tensor."""
            tensors: list[Any] = []
            for field in fields:
                try:
                    self._check(start_offs + int(field.parts[5][0]))  # the package's own sum wraps around
                    super()._build_tensors(start_offs, [field])
                except _READER_ERRORS as error:
                    raise ValueError(f"tensor {field.name}: {_text(error)}") from None
                tensors += self.tensors  # set by the call above
            self.tensors: list[Any] = tensors

        def _check(self, stop: int) -> None:
            if stop > len(self.data):
                raise ValueError(
                    f"it needs bytes up to {stop:,}, but the file has {len(self.data):,}: it is cut short, or damaged"
                )

    return BoundedGgufReader


def _text(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "reading GGUF files needs the gguf package: python -m pip install 'slipstream-rl[gguf]'"
        ) from None
    return gguf
