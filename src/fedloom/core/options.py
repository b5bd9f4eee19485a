"""Options that are declared once, as fields of a dataclass, for the command line, Python and child processes.

A field with an :class:`Option` in its annotation, ``out: Annotated[Path | None, Option("Folder of the run.")] = None``,
is an option of every command whose function takes the dataclass (:func:`fedloom.cli.options.with_options`), a keyword
of every Python function decorated with :func:`with_keywords`, and a word of a child's command line (:func:`as_words`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from fedloom.core.home import expanded

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """Description of a field that is an option.

    Attributes
    ----------
    help
        Meaning, in words of no front end.
    flag
        Name on the command line; None: the field's name with dashes. ``--yes/--no`` for a boolean.
    metavar
        Form of the value on the command line.
    envvar
        Environment variable that sets it on the command line.
    least
        Smallest number allowed on the command line.
    """

    help: str
    flag: str | None = None
    metavar: str | None = None
    envvar: str | None = None
    least: float | None = None


@dataclass(frozen=True)
class DeclaredOption:
    """Field of a dataclass that is an option: its name, type, default and description."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def is_sequence(self) -> bool:
        """True if several values may be given, as a tuple."""
        return get_origin(self.type) is tuple


def declared_options(model: type) -> list[DeclaredOption]:
    """Return the options of a dataclass, whose annotations are objects, not texts."""
    options = []
    for field in fields(model):
        if get_origin(field.type) is Annotated:
            kind, *metadata = get_args(field.type)
            for option in (each for each in metadata if isinstance(each, Option)):
                default = () if field.default is MISSING else field.default
                options.append(DeclaredOption(field.name, kind, default, option))
    return options


def as_words(options: Any) -> list[str]:
    """Return the words of a command line that give these options, without those at their defaults."""
    words: list[str] = []
    for each in declared_options(type(options)):
        value = getattr(options, each.name)
        if isinstance(value, bool):
            yes, _, no = each.flag.partition("/")
            words += [yes] if value else [no] if no else []
        elif each.is_sequence:
            words += [word for item in value for word in (each.flag, str(item))]
        elif value != each.default:
            words += [each.flag, str(value)]
    return words


def from_keywords(model: Callable[..., T], keywords: Mapping[str, Any]) -> T:
    """Return an instance from values that Python users give: paths as texts, and one value in place of several."""
    values = dict(keywords)
    for each in declared_options(model):  # type: ignore[arg-type]
        value = values.get(each.name)
        if value is None:
            continue
        kinds = get_args(each.type)
        if each.is_sequence:
            several = [value] if isinstance(value, str | Path) else value
            values[each.name] = tuple(expanded(item) if Path in kinds else item for item in several)
        elif each.type is Path or Path in kinds:
            values[each.name] = expanded(value)
        elif isinstance(value, Path):
            values[each.name] = str(value)
    return model(**values)


def with_keywords(model: type, *, excluded: Iterable[str] = ()) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that gives a function the options of a dataclass as keywords.

    The function's keyword ``options`` gets an instance, and its ``**overrides`` get all other keywords. Its signature
    lists the options, and its docstring describes them in place of the line ``{options}``.
    """
    options = [each for each in declared_options(model) if each.name not in set(excluded)]
    names = {each.name for each in options}

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> T:
            values = {name: keywords.pop(name) for name in names & keywords.keys()}
            return function(*args, options=from_keywords(model, values), **keywords)

        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name != "options"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(o.name, keyword, default=o.default, annotation=_python_type(o)) for o in options]
        place = next((i for i, p in enumerate(parameters) if p.kind in (keyword, p.VAR_KEYWORD)), len(parameters))
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters[:place], *added, *parameters[place:]]
        )
        parameters_text = "\n".join(f"    {each.name}\n        {each.option.help}" for each in options)
        call.__doc__ = (function.__doc__ or "").replace("    {options}", parameters_text)
        return call

    return decorate


def _python_type(each: DeclaredOption) -> str:
    if each.is_sequence:
        return "str | Path | Iterable[str | Path]"
    name = each.type.__name__ if isinstance(each.type, type) else str(each.type).replace("pathlib.", "")
    return name.replace("Path", "str | Path")
