"""Nested frozen dataclasses from and to dictionaries, TOML and `a.b=c` overrides, checked against their type hints.

Knows nothing of training: any dataclass whose fields are bool, int, float, str, Literal, Optional, tuples, lists,
dictionaries or other dataclasses will do. Every refusal names the dotted path, the value and what was expected.

TOML has no null. A None that is also the default is left out; any other None is written as the string "none", which
reads back as None wherever the field allows it.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import tomli_w

from gem_train.errors import UserError

T = TypeVar("T")
Tree = Mapping[str, Any]


def from_dict(kind: type[T], tree: Tree, path: str = "") -> T:
    """Build `kind` from nested dictionaries; fields that are not mentioned take their defaults."""
    hints = _hints(kind)
    _refuse_unknown(kind, tree, path)
    values = {name: coerce(value, hints[name], _join(path, name)) for name, value in tree.items()}
    return _construct(kind, values, path)


def to_dict(config: Any) -> dict[str, Any]:
    """The nested dictionaries that `from_dict` turns back into an equal object, in field order."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config) if not _omitted(config, f)}


def update(config: T, tree: Tree, path: str = "") -> T:
    """A copy of `config` in which the leaves that `tree` mentions are replaced."""
    _refuse_unknown(type(config), tree, path)
    hints = _hints(type(config))
    values: dict[str, Any] = {}
    for name, value in tree.items():
        current, here = getattr(config, name), _join(path, name)
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            values[name] = update(current, value, here)
        elif isinstance(current, Mapping) and isinstance(value, Mapping):
            values[name] = _update_mapping(current, value, hints[name], here)
        else:
            values[name] = coerce(value, hints[name], here)
    kept = {f.name: getattr(config, f.name) for f in dataclasses.fields(typing.cast(Any, config)) if f.init}
    return _construct(type(config), {**kept, **values}, path)


def override(config: T, assignments: Iterable[str]) -> T:
    """Apply `a.b=c` assignments, later ones winning.

    A value is read as the type of its field; `none` clears an optional one. Tuples and lists may be written `1,2,3` or
    as TOML (`[1, 2, 3]`), dictionaries as inline TOML (`{a = 1}`).
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, raw = assignment.partition("=")
        path = path.strip()
        if not equals or not path:
            raise UserError(f"cannot read the override {assignment!r}; expected path.to.key=value")
        _put(tree, path, _read(raw.strip(), _hint_at(config, path), path))
    return update(config, tree)


def to_toml(config: Any) -> str:
    """The configuration as TOML; `from_toml(type(config), to_toml(config)) == config`."""
    return tomli_w.dumps(to_dict(config))


def from_toml(kind: type[T], source: str | Path) -> T:
    """Read `kind` from TOML text or, given a Path, from that file."""
    try:
        text = source.read_text() if isinstance(source, Path) else source
        return from_dict(kind, tomllib.loads(text))
    except OSError as error:
        raise UserError(f"cannot read the configuration {source}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        where = f"{source}: " if isinstance(source, Path) else ""
        raise UserError(f"{where}not valid TOML: {error}") from error


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two configurations of one type differ, as lines `path: old -> new`."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        fields = [f.name for f in dataclasses.fields(old)]
        return [line for n in fields for line in differences(getattr(old, n), getattr(new, n), _join(path, n))]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(k for k in new if k not in old)]
        return [line for k in keys for line in differences(old.get(k), new.get(k), _join(path, str(k)))]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def coerce(value: Any, hint: Any, path: str) -> Any:
    """`value` as `hint` wants it, or a UserError. An int is a fine float; nothing else is converted silently."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in args and (value is None or value == "none"):
            return None
        return _coerce_union(value, [a for a in args if a is not type(None)], hint, path)
    if hint is Any:
        return value
    if origin is Literal:
        if value in args:
            return value
        raise UserError(f"{path}: got {value!r}; expected {describe(hint)}{suggest(str(value), map(str, args))}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_dict(hint, value, path)
    elif origin in (tuple, list) and isinstance(value, (list, tuple)):
        kinds = _element_kinds(hint, args, len(value), value, path)
        items = [coerce(v, k, f"{path}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True))]
        return tuple(items) if origin is tuple else items
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(k): coerce(v, args[1], _join(path, str(k))) for k, v in value.items()}
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise UserError(f"{path}: got {value!r} ({type(value).__name__}); expected {describe(hint)}")


def describe(hint: Any) -> str:
    """A type hint in a user's words: "a whole number", "one of 'a', 'b'", "a number or none"."""
    origin, args = get_origin(hint), get_args(hint)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    if hint in names:
        return names[hint]
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (tuple, list):
        return "a list of " + " / ".join(dict.fromkeys(describe(a) for a in args if a is not Ellipsis))
    if origin in (dict, Mapping):
        return f"a table whose values are {describe(args[1])}"
    if dataclasses.is_dataclass(hint):
        return "a table with the keys " + ", ".join(f.name for f in dataclasses.fields(hint))
    return getattr(hint, "__name__", str(hint))


def suggest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the closest known name, or nothing."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""


def leaves(kind: type, path: str = "") -> list[str]:
    """Every dotted path that a configuration class offers, sections included."""
    found = []
    for name, hint in _hints(kind).items():
        found.append(_join(path, name))
        for nested in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(nested) and isinstance(nested, type):
                found += leaves(nested, _join(path, name))
    return found


def _construct(kind: type[T], values: dict[str, Any], path: str) -> T:
    missing = [
        f.name
        for f in dataclasses.fields(typing.cast(Any, kind))
        if f.init and f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{_join(path, missing[0])} is missing; expected {describe(_hints(kind)[missing[0]])}")
    try:
        return kind(**values)
    except UserError:
        raise
    except (ValueError, TypeError) as error:  # the class's own checks, which know the field but not the path
        raise UserError(f"{path}: {error}" if path else str(error)) from error


def _refuse_unknown(kind: type, tree: Tree, path: str) -> None:
    known = [f.name for f in dataclasses.fields(typing.cast(Any, kind)) if f.init]
    for name in tree:
        if name not in known:
            hint = suggest(name, known) or f"; expected one of {', '.join(known)}"
            raise UserError(f"unknown key {_join(path, name)!r}{hint}")


def _hint_at(config: Any, path: str) -> Any:
    """The type of the field at a dotted path, following the values that are there (a dictionary's keys included)."""
    here, hint, value = "", type(config), config
    for name in path.split("."):
        if dataclasses.is_dataclass(value) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
            kind = type(value) if dataclasses.is_dataclass(value) else hint
            hints = _hints(kind)
            if name not in hints:
                every = leaves(type(config))
                ends = [p for p in every if p.split(".")[-1] == name]
                close = f"; did you mean {ends[0]!r}?" if ends else suggest(path, every)
                listed = f"; expected one of {', '.join(_join(here, n) for n in hints)}"
                raise UserError(f"unknown key {path!r}{close or listed}")
            hint, value = hints[name], getattr(value, name, None)
        elif get_origin(hint) in (dict, Mapping):
            hint, value = get_args(hint)[1], value.get(name) if isinstance(value, Mapping) else None
        else:
            raise UserError(f"unknown key {path!r}: {here!r} is {describe(hint)}, it has no keys of its own")
        hint = hint if value is None else _member_for(value, hint)
        here = _join(here, name)
    return hint


def _member_for(value: Any, hint: Any) -> Any:
    """Inside an Optional or Union, the member that the current value belongs to, when it is a dataclass."""
    if get_origin(hint) in (Union, types.UnionType) and dataclasses.is_dataclass(value):
        return type(value)
    return hint


def _read(raw: str, hint: Any, path: str) -> Any:
    """The text of an override as the value its field expects; left as text where that fails, for `coerce` to refuse."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in args and raw == "none":
            return None
        for member in args:
            if member is not type(None):
                try:
                    return coerce(_read(raw, member, path), member, path)
                except UserError:
                    continue
        raise UserError(f"{path}: got {raw!r}; expected {describe(hint)}")
    if hint is str:
        return raw
    if hint is bool:
        return {"true": True, "false": False}.get(raw.lower(), raw)
    if origin in (tuple, list) and not raw.startswith("["):
        kinds = [a for a in args if a is not Ellipsis]
        parts = [p.strip() for p in raw.split(",") if p.strip()]
        return [_read(p, kinds[min(i, len(kinds) - 1)], path) for i, p in enumerate(parts)]
    try:
        if hint is int:
            return int(raw)
        if hint is float:
            return float(raw)
        if origin is Literal:
            return next((a for a in args if str(a) == raw), raw)
        return tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, tomllib.TOMLDecodeError):
        return raw


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        nested = tree.get(name)
        tree = tree.setdefault(name, {}) if not isinstance(nested, Mapping) else typing.cast(dict, nested)
    tree[last] = value


def _update_mapping(current: Tree, tree: Tree, hint: Any, path: str) -> dict[str, Any]:
    kind = get_args(hint)[1] if get_args(hint) else Any
    merged = dict(current)
    for key, value in tree.items():
        here = _join(path, key)
        nested = dataclasses.is_dataclass(current.get(key)) and isinstance(value, Mapping)
        merged[key] = update(current[key], value, here) if nested else coerce(value, kind, here)
    return merged


def _coerce_union(value: Any, members: list[Any], hint: Any, path: str) -> Any:
    if len(members) == 1:
        try:
            return coerce(value, members[0], path)
        except UserError:
            if isinstance(value, Mapping):
                raise  # the message about the key inside says more
    for member in members:
        try:
            return coerce(value, member, path)
        except UserError:
            continue
    raise UserError(f"{path}: got {value!r} ({type(value).__name__}); expected {describe(hint)}")


def _element_kinds(hint: Any, args: tuple[Any, ...], count: int, value: Any, path: str) -> list[Any]:
    if get_origin(hint) is list or (len(args) == 2 and args[1] is Ellipsis):
        return [args[0]] * count
    if len(args) != count:
        raise UserError(f"{path}: got {list(value)!r}; expected {len(args)} elements")
    return list(args)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return "none" if value is None else value


def _omitted(config: Any, field: dataclasses.Field[Any]) -> bool:
    return not field.init or (getattr(config, field.name) is None and field.default is None)


def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
