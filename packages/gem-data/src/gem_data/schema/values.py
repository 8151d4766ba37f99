"""From Arrow columns of any number-like type to the typed numpy columns of a schema, and why a value is refused."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_data.ragged import Ragged
from gem_data.schema.columns import TIME, Column

Array = NDArray[Any]

# A row keeps the first reason that is found; 0 is a good row.
REASONS = (
    "", "missing", "unparsable", "not finite", "not an integer", "out of range", "wrong size", "duplicate", "late",
)  # fmt: skip
MISSING, UNPARSABLE, NOT_FINITE, NOT_INTEGER, OUT_OF_RANGE, WRONG_SIZE, DUPLICATE, LATE = range(1, 9)

NO_KEY = np.iinfo(np.int64).min  # the key of a value that is missing where its column has a default

# Seconds: the year 5138. Milliseconds of today are beyond it, so a wrong unit does not pass.
TIME_LIMIT = 100_000_000_000
_PLAIN = re.compile(r"0|-?[1-9][0-9]{0,17}")
_INTEGER = r"^[+-]?[0-9]{1,18}$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?$"
_NOT_FINITE = r"(?i)^[+-]?(nan|inf|infinity)$"


def _single(chunked: pa.ChunkedArray) -> pa.Array:
    array = chunked.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # what pyarrow gives for no chunk at all
        array = (
            array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks or [pa.array([], chunked.type)])
        )
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


def column_values(
    source: pa.ChunkedArray, column: Column, texts: dict[str, dict[int, str]]
) -> tuple[Any, NDArray[np.int8]]:
    """Values [n] of a declared column, [n, size] or Ragged, and fault codes [n]: 0, or the number of a reason.

    `texts` receives, by column and key, what the keys of a text vocabulary stand for. Raises TypeError for an Arrow
    type that can't hold the column's kind.
    """
    array = _single(source)
    if column.kind == "ids":
        return _lists(array, column, texts)
    if column.kind == "vector":
        values, fault = _vector(array, column)
    elif column.kind == "float":
        values, fault = _to_float32(*_numbers(array, column.name))
    else:
        values, fault = _ids(array, column, texts)
    if column.default is not None:
        filled = fault == MISSING
        values[filled] = NO_KEY if column.vocabulary else column.default
        fault[filled] = 0
    return values, fault


def _ids(array: pa.Array, column: Column, texts: dict[str, dict[int, str]]) -> tuple[Array, NDArray[np.int8]]:
    """ids in their range, bit masks in theirs, or the keys of a vocabulary (any int64 but NO_KEY, or text)."""
    if column.vocabulary and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return _text_keys(array, texts.setdefault(column.name, {}))
    values, fault = _numbers(array, column.name)
    values = _to_integers(values, fault)
    if column.vocabulary:
        _mark(fault, values == NO_KEY, OUT_OF_RANGE)
    else:
        limit = 1 << int(column.size or 0) if column.kind == "bits" else int(column.cardinality or 0)
        _mark(fault, (values < 0) | (values >= limit), OUT_OF_RANGE)
    return values, fault


def _text_keys(array: pa.Array, texts: dict[int, str]) -> tuple[Array, NDArray[np.int8]]:
    """Text as int64: a plain decimal number is itself, other text 64 bits of its BLAKE2b digest; empty is missing."""
    coded = pc.utf8_trim_whitespace(array).dictionary_encode()
    keys = np.empty(len(coded.dictionary) + 1, np.int64)
    empty = np.zeros(len(keys), bool)
    empty[-1] = True  # of nulls
    for i, text in enumerate(coded.dictionary.to_pylist()):
        empty[i] = not text
        if _PLAIN.fullmatch(text):
            keys[i] = int(text)
        else:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            keys[i] = max(int.from_bytes(digest, "little", signed=True), NO_KEY + 1)
            if text:
                texts[int(keys[i])] = text
    keys[-1] = 0
    at = coded.indices.fill_null(len(keys) - 1).to_numpy(zero_copy_only=False)
    return keys[at], np.where(empty[at], MISSING, 0).astype(np.int8)


def keys_of(array: pa.Array) -> NDArray[np.int64]:
    """Keys [n] of text or integers, NO_KEY for what is missing. Raises ValueError for what is no key."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        keys, fault = _text_keys(array, {})
    else:
        values, fault = _numbers(array, "keys")
        keys = _to_integers(values, fault)
    bad = np.flatnonzero(fault > MISSING)
    if bad.size:
        raise ValueError(f"{array[int(bad[0])].as_py()!r} is {REASONS[fault[bad[0]]]}, so it is no key of a vocabulary")
    return np.where(fault == MISSING, NO_KEY, keys)


def _lists(array: pa.Array, column: Column, texts: dict[str, dict[int, str]]) -> tuple[Ragged, NDArray[np.int8]]:
    kind, n = array.type, len(array)
    if pa.types.is_null(kind):
        array = pa.array([None] * n, pa.large_list(pa.int64()))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise TypeError(f"column {column.name!r} has the Arrow type {kind}; expected a list of integers")
    null = pc.is_null(array).to_numpy(zero_copy_only=False)
    fault = np.where(null & (column.default is None), MISSING, 0).astype(np.int8)
    lengths = np.array(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    lengths[null] = 0
    values, inner = _ids(pc.list_flatten(array), column, texts)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    wrong = np.flatnonzero(inner)[::-1]  # backwards, so that the first faulty element of a row speaks for it
    fault[np.searchsorted(offsets, wrong, side="right") - 1] = inner[wrong]
    return Ragged(np.asarray(values, np.int64), offsets), fault


def time_values(source: pa.ChunkedArray) -> tuple[Array, NDArray[np.int8]]:
    """Seconds [n] int64 of numbers (seconds), text of such, timestamps or dates; and fault codes [n]."""
    array = _single(source)
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        # Floor, not truncate, and not a cast to seconds, which refuses fractions.
        nanos = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        array = pc.floor(pc.divide(nanos.cast(pa.float64()), 1e6))
    values, fault = _numbers(array, TIME)
    if values.dtype.kind == "f":
        values = np.floor(values)  # a fraction of a second only makes ties, and ties are never history
    values = _to_integers(values, fault)
    _mark(fault, np.abs(values) > TIME_LIMIT, OUT_OF_RANGE)
    return values, fault


def _mark(fault: NDArray[np.int8], bad: NDArray[np.bool_], reason: int) -> None:
    fault[bad & (fault == 0)] = reason


def _numbers(array: pa.Array, name: str) -> tuple[Array, NDArray[np.int8]]:
    """int64 or float64 values and fault codes; a faulty row holds 0."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _parse(array)
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        if not pa.types.is_null(kind):
            raise TypeError(f"column {name!r} has the Arrow type {kind}; expected numbers or strings of numbers")
        return np.zeros(len(array), np.int64), np.full(len(array), MISSING, np.int8)
    fault = np.zeros(len(array), np.int8)
    fault[pc.is_null(array).to_numpy(zero_copy_only=False)] = MISSING
    if pa.types.is_uint64(kind):  # its upper half wraps to negative ids, which are out of range as well
        return array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), fault
    wide = pa.float64() if pa.types.is_floating(kind) or pa.types.is_decimal(kind) else pa.int64()
    return _finite(array.cast(wide).fill_null(0).to_numpy(zero_copy_only=False), fault)


def _finite(values: Array, fault: NDArray[np.int8]) -> tuple[Array, NDArray[np.int8]]:
    if values.dtype.kind == "f":
        bad = ~np.isfinite(values)
        _mark(fault, bad, NOT_FINITE)
        values = np.where(bad, 0.0, values)
    return values, fault


def _parse(array: pa.Array) -> tuple[Array, NDArray[np.int8]]:
    text = pc.utf8_trim_whitespace(array).fill_null("")

    def matches(pattern: str) -> NDArray[np.bool_]:
        return pc.match_substring_regex(text, pattern).to_numpy(zero_copy_only=False)

    integer, real = matches(_INTEGER), matches(_FLOAT)
    fault = np.where(integer | real, 0, UNPARSABLE).astype(np.int8)
    fault[matches(_NOT_FINITE)] = NOT_FINITE
    fault[matches("^$")] = MISSING
    if (integer | (fault != 0)).all():
        plain = pc.replace_substring_regex(text, r"^\+", "")
        return pc.if_else(pa.array(integer), plain, "0").cast(pa.int64()).to_numpy(zero_copy_only=False), fault
    plain = pc.replace_substring_regex(text, r"^\+", "")
    return _finite(
        pc.if_else(pa.array(integer | real), plain, "0").cast(pa.float64()).to_numpy(zero_copy_only=False), fault
    )


def _to_integers(values: Array, fault: NDArray[np.int8]) -> NDArray[np.int64]:
    if values.dtype.kind == "f":
        _mark(fault, values != np.floor(values), NOT_INTEGER)
        beyond = np.abs(values) >= 2.0**63
        _mark(fault, beyond, OUT_OF_RANGE)
        values = np.where(beyond, 0.0, values)
    return values.astype(np.int64)


def _to_float32(values: Array, fault: NDArray[np.int8]) -> tuple[Array, NDArray[np.int8]]:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = ~np.isfinite(narrow)
    _mark(fault, np.asarray(bad.any(axis=1)) if bad.ndim == 2 else bad, NOT_FINITE)
    return np.where(bad, np.float32(0), narrow), fault


def _vector(array: pa.Array, column: Column) -> tuple[Array, NDArray[np.int8]]:
    kind, size = array.type, int(column.size or 0)
    fault = np.zeros(len(array), np.int8)
    values = np.zeros((len(array), size), np.float64)
    if pa.types.is_null(kind):
        return values.astype(np.float32), np.full(len(array), MISSING, np.int8)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise TypeError(f"column {column.name!r} has the Arrow type {kind}; expected a list of {size} numbers")
    fault[pc.is_null(array).to_numpy(zero_copy_only=False)] = MISSING
    lengths = pc.list_value_length(array).fill_null(size).to_numpy(zero_copy_only=False)
    _mark(fault, lengths != size, WRONG_SIZE)
    good = fault == 0
    inner, inner_fault = _numbers(pc.list_flatten(array.filter(pa.array(good))), column.name)
    values[good] = inner.reshape(-1, size)
    # The first faulty element speaks for its row.
    codes = inner_fault.reshape(-1, size)
    fault[good] = codes[np.arange(len(codes)), (codes != 0).argmax(axis=1)]
    return _to_float32(values, fault)
