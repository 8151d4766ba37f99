"""List the public API of every package, and compare it with the committed listing and with the last release.

    python tools/public_api.py            compare; exits with 1 when something public has gone or changed unannounced
    python tools/public_api.py --write    write the listings, docs/reference/<package>.txt

The API is what a package's `__all__` names, with the public members of those classes and modules: parameters, their
kinds and defaults, without annotations; of attributes those that the class itself declares. It is read from the source
by griffe; nothing is imported. A name may go when the listing says that it is deprecated
(`typing_extensions.deprecated`). New names and new options are reported and never fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import griffe
from oldest import checkout, released
from packaging.version import Version
from workspace import ROOT, packages

LISTINGS = ROOT / "docs" / "reference"
MARK = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}


def signature(function: griffe.Function | griffe.Class) -> str:
    """Parameters as in the source, without annotations and without self or cls."""
    words, bare_star = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not bare_star:
            bare_star = True
            words.append("*")
        if parameter.kind is griffe.ParameterKind.var_positional:
            bare_star = True
        default = "" if parameter.kind in MARK or parameter.default is None else f"={parameter.default}"
        words.append(f"{MARK.get(parameter.kind, '')}{parameter.name}{default}")
    return f"({', '.join(words)})"


def deprecated(thing: griffe.Object) -> bool:
    """Whether a `deprecated` decorator announces that the name will go."""
    decorators = thing.decorators if isinstance(thing, griffe.Function | griffe.Class) else []
    return any(decorator.callable_path.endswith("deprecated") for decorator in decorators)


def resolve(module: griffe.Module, name: str) -> griffe.Object | None:
    """What `module.name` is; a function wins over the folder of the same name that it is imported from."""
    member = module.members.get(name)
    if member is None:
        return None
    try:
        found = member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError:
        return None  # from another distribution
    if isinstance(found, griffe.Module) and name in found.members:
        inner = resolve(found, name)  # of another distribution where a module `nn` imports torch's
        return found if inner is None else inner
    return found


def lines(thing: griffe.Object, path: str) -> Iterator[str]:
    """The listing of one public name and its public members."""
    note = "  # deprecated" if deprecated(thing) else ""
    if isinstance(thing, griffe.Module):
        exported = [str(name) for name in thing.exports] if thing.exports is not None else None
        for name in sorted(exported or [n for n, m in thing.members.items() if m.is_public and not m.is_alias]):
            target = resolve(thing, name)
            if target is not None:
                yield from lines(target, f"{path}.{name}")
    elif isinstance(thing, griffe.Class):
        yield f"class {path}{signature(thing)}{note}"
        members = {**thing.inherited_members, **thing.members}
        for name, member in sorted(members.items()):
            if name.startswith("_"):
                continue
            found = member.final_target if isinstance(member, griffe.Alias) else member
            set_in_init = found.labels == {"instance-attribute"} and "dataclass" not in thing.labels
            if not isinstance(found, griffe.Module) and not set_in_init:
                yield from lines(found, f"{path}.{name}")
    elif isinstance(thing, griffe.Function):
        yield f"{path}{signature(thing)}{note}"
    else:
        yield f"{path}{note}"


def listing(package: str, source: Path) -> list[str]:
    """All lines of a package, sorted; `source` is the folder that holds its modules."""
    module = griffe.load(package.replace("-", "_"), search_paths=[source], resolve_aliases=True)
    assert isinstance(module, griffe.Module)
    assert module.exports is not None, f"{package} has no __all__"
    return sorted({line for line in lines(module, module.name) if "__version__" not in line})


def name_of(line: str) -> str:
    """The dotted name in a line of a listing."""
    return line.removeprefix("class ").partition("(")[0].partition("  #")[0]


def parameters(line: str) -> tuple[list[str], list[str]]:
    """The positional and the keyword-only parameters in a line of a listing."""
    inside = line.partition("(")[2].removesuffix("  # deprecated").removesuffix(")")
    words, depth, start = [], 0, 0
    for i, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            words.append(inside[start:i].strip())
            start = i + 1
    words += [inside[start:].strip()] if inside[start:].strip() else []
    star = next((i for i, word in enumerate(words) if word.startswith("*") and not word.startswith("**")), len(words))
    return words[:star], [word for word in words[star:] if word != "*"]


def compatible(old: str, new: str) -> bool:
    """Whether every call that the old line allows means the same by the new one: only options were added."""
    if ("(" in old) != ("(" in new) or old.startswith("class ") != new.startswith("class "):
        return False
    (before, before_keywords), (after, after_keywords) = parameters(old), parameters(new)
    added = after[len(before) :] + [word for word in after_keywords if word not in before_keywords]
    kept = after[: len(before)] == before and set(before_keywords) <= set(after_keywords)
    return kept and all("=" in word or word.startswith("*") for word in added)


def compare(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """(what has gone or changed without having been deprecated, what is new), as lines to print."""
    old, new = ({name_of(line): line for line in side} for side in (before, after))
    broken = []
    for name, line in old.items():
        owner_went = name.rpartition(".")[0] in old.keys() - new.keys()  # and is reported itself
        if name not in new and not line.endswith("# deprecated") and not owner_went:
            broken.append(f"- {line}")
        elif name in new and not compatible(line, new[name]):
            broken.append(f"- {line}\n    + {new[name]}")
    return broken, [f"+ {line}" for name, line in new.items() if name not in old]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the listings instead of comparing with them")
    parser.add_argument("packages", nargs="*", default=packages(), help="default: all")
    options = parser.parse_args()
    failed = False
    for package in options.packages:
        fresh, path = listing(package, ROOT / "packages" / package / "src"), LISTINGS / f"{package}.txt"
        if options.write:
            path.write_text("\n".join(fresh) + "\n")
            print(f"{package}: {len(fresh)} public names")
            continue
        broken, new = compare(path.read_text().splitlines(), fresh)
        print(f"{package}: {len(fresh)} public names, {len(new)} new, {len(broken)} gone or changed since the listing")
        print(*(f"  {line}" for line in (*broken, *new)), sep="\n", end="\n" if broken or new else "")
        failed |= bool(broken)
        tag = max(released(package), key=Version, default=None)
        if tag is not None:
            with tempfile.TemporaryDirectory() as folder:
                checkout(package, tag, Path(folder))
                broken, new = compare(listing(package, Path(folder, package, "src")), fresh)
            print(f"  since {package} {tag}: {len(new)} new, {len(broken)} gone or changed")
            print(*(f"  {line}" for line in broken), sep="\n", end="\n" if broken else "")
    if failed:
        sys.exit("deprecate before you remove; for a change that is meant: --write, and a fragment in changes/")


if __name__ == "__main__":
    main()
