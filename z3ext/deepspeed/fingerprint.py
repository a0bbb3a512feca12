"""A hash of a function's source, and of every wrapper around it.

It covers the normalised syntax tree, without comments, docstrings and positions, and is the same
under every Python version.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator


def _normalised(node: object) -> object:
    if isinstance(node, ast.AST):
        fields = {
            name: value
            for name, value in ast.iter_fields(node)
            # Absent in some Python versions, or without meaning.
            if name not in ("ctx", "kind", "type_comment", "type_params")
            and value is not None
            and value != []
        }
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends some format specifications with ""
            fields["values"] = [value for value in node.values if not _is_empty(value)]
        body = fields.get("body")
        if isinstance(body, list) and _is_docstring(body[0]):
            fields["body"] = body[1:]
        return (type(node).__name__, [(name, _normalised(fields[name])) for name in sorted(fields)])
    if isinstance(node, list):
        return [_normalised(item) for item in node]
    return repr(node)


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == ""


def _is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _layers(function: object) -> Iterator[types.FunctionType]:
    """A function and, where it is a decorator's wrapper, the functions that it wraps."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        layer = waiting.pop()
        if isinstance(layer, (staticmethod, classmethod)):
            layer = layer.__func__
        if not isinstance(layer, types.FunctionType) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        if hasattr(layer, "__wrapped__"):
            waiting.append(layer.__wrapped__)
            continue
        for cell in layer.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)


# Every engine asks again, and parsing takes 0.1 s: by function, with the code that it had.
_texts: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, str]] = (
    weakref.WeakKeyDictionary()
)


def _layer_text(function: types.FunctionType) -> str:
    # torch's own decorators (no_grad) differ between its versions and are not DeepSpeed's matter.
    module = function.__globals__.get("__name__", "")
    if module == "torch.utils._contextlib":
        return "torch: decorate_context"  # since torch 2.15 it has the decorator's name
    if module.partition(".")[0] == "torch":
        return f"torch: {function.__code__.co_name}"
    code = function.__code__
    kept = _texts.get(function)
    if kept is None or kept[0] is not code:
        # Not the function's source, which would be that of what it wraps.
        source = textwrap.dedent(inspect.getsource(code))
        kept = _texts[function] = (code, repr(_normalised(ast.parse(source))))
    return kept[1]


def fingerprint(function: object) -> str:
    """16 hexadecimal digits for a function's source and that of the wrappers around it.

    "" where there is no source to read.
    """
    try:
        layers = [_layer_text(layer) for layer in _layers(function)]
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    return hashlib.sha256(repr(layers).encode()).hexdigest()[:16] if layers else ""


def resolve(cls: type, name: str) -> object:
    """The object that ``name`` resolves to on a class, as stored: no binding. None if absent."""
    return inspect.getattr_static(cls, name, None)
