"""From a setting to a function of the user's: `"module:function"`, or the function itself, to be run in another process.

    check_function   in the trainer, before anything starts; imports nothing of the user's
    load_function    in the process that runs it (`main_of`, `import_main`: a function of the user's script is found there)

Every setting that takes a function goes through here (reward, filter, rollout), so that all give the same answers to the same mistakes.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mprollout.errors import ConfigError


def check_function(field: str, spec: Any, arguments: Sequence[str], kwargs: dict[str, Any] | None = None) -> None:
    """Refuse what cannot work.

    Args:
        field: the setting, as it is named in the error (`RewardConfig.function`).
        spec: "module:function" or a function.
        arguments: names of the positional arguments that it is called with.
        kwargs: the keyword arguments; None where the setting takes none.

    Raises:
        ConfigError: neither of the two, a missing module, arguments that do not fit, or nothing that another process can import.
    """
    if isinstance(spec, str):
        module, _, attribute = spec.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ConfigError(f'{field} must be "module:function"; got {spec!r}')
        if importlib.util.find_spec(module.split(".")[0]) is None:
            raise ConfigError(f"{field}: no module {module.split('.')[0]!r} on sys.path; got {spec!r}")
    elif not callable(spec):
        raise ConfigError(f"{field} must be a name or a function; got {spec!r}")
    else:
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None) or ""  # "<stdin>" is none
        if getattr(spec, "__module__", None) == "__main__" and not (
            getattr(main, "__spec__", None) or os.path.isfile(file)
        ):
            raise ConfigError(
                f"{field}: {spec!r} is defined in an interactive session, which the worker processes cannot import: put it "
                'into a file and name it "module:function"'
            )
        check_arguments(field, spec, spec, arguments, kwargs)
    try:
        pickle.dumps((spec, kwargs))
    except Exception as error:  # pickle raises PicklingError, AttributeError, TypeError, and what a __reduce__ raises
        owner = field.partition(".")[0]
        raise ConfigError(
            f"{owner} cannot be handed to another process ({error}): the function must be a `def` at the top level of "
            "a module (no lambda, no function inside a function)"
            + (f"; hand it what it closes over as {owner}.kwargs" if kwargs is not None else "")
        ) from error


def check_arguments(
    field: str, spec: Any, function: Callable[..., Any], arguments: Sequence[str], kwargs: dict[str, Any] | None
) -> None:
    """Refuse a function that cannot be called so; `spec` is how the user named it.

    Raises:
        ConfigError: with the call and the signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*arguments, **(kwargs or {}))
    except TypeError as error:
        raise ConfigError(
            f"{field} is called as f({', '.join([*arguments, *(f'{key}=...' for key in kwargs or {})])}), which does not fit "
            f"{spec!r} with the signature {signature}: {error}"
        ) from error


def load_function(
    field: str, spec: Any, arguments: Sequence[str], kwargs: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The function, its kwargs bound. Imports the user's module (blocks for as long as that takes).

    Raises:
        ConfigError: the module has no such function, or its arguments do not fit.
        Exception: whatever the user's module raises when it is imported.
    """
    found = spec
    if isinstance(spec, str):
        name, _, path = spec.partition(":")
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it was found, and lacks something itself
            raise ConfigError(f"{field}={spec!r}: {error}") from error
        for attribute in path.split("."):
            if not hasattr(found, attribute):
                near = difflib.get_close_matches(attribute, dir(found), n=3)
                hint = f" (did you mean {', '.join(near)}?)" if near else ""
                raise ConfigError(f"{field}={spec!r}: {found!r} has no {attribute!r}{hint}")
            found = getattr(found, attribute)
        if not callable(found):
            raise ConfigError(f"{field}={spec!r} must name a function; it is {found!r}")
        check_arguments(field, spec, found, arguments, kwargs)
    return functools.partial(found, **kwargs) if kwargs else found


def main_of(*functions: Any) -> tuple[str | None, str | None]:
    """Module name (of `python -m`) and path of this process's `__main__`, for `import_main`; nothing where it defines none of the functions."""
    if not any(getattr(function, "__module__", None) in ("__main__", "__mp_main__") for function in functions):
        return None, None
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(getattr(main, "__spec__", None), "name", None), os.path.abspath(path) if path else None


def import_main(name: str | None, path: str | None) -> None:
    """Make the user's script importable as `__main__`, as multiprocessing's spawn does, so that its functions unpickle."""
    if name is None and path is None:
        return
    from multiprocessing import spawn

    if name is not None:  # python -m package.module
        spawn._fixup_main_from_name(name)  # type: ignore[attr-defined]
    else:
        spawn._fixup_main_from_path(path)  # type: ignore[attr-defined]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call makes a coroutine: an `async def`, one with bound arguments, or an object with an async `__call__`."""
    target = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
