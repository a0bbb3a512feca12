"""Which DeepSpeed sources z3ext knows: a hash of each method that it replaces or relies on.

A hash covers the normalised syntax tree, without comments, docstrings and positions, of the method
and of every wrapper around it. It is the same under every Python version.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator

#: Methods of DeepSpeedZeroOptimizer_Stage3 that z3ext replaces, by their name in the class.
PRIVATE = "_DeepSpeedZeroOptimizer_Stage3"
ADD_GRAD = f"{PRIVATE}__add_grad_to_ipg_bucket"
REDUCE_BUCKET = f"{PRIVATE}__reduce_and_partition_ipg_grads"
BEGIN = "backward_prologue"
READY = "reduce_ready_partitions_and_remove_grads"
REPLACED = (
    BEGIN,
    READY,
    ADD_GRAD,
    REDUCE_BUCKET,
    "has_overflow",
    "_get_norm_groups",
    "_prepare_fp32_grad_for_sub_group",
    "unscale_and_clip_grads",
    "_loss_scale_update_and_overflow_cleanup",
    "_post_step",
)
#: Replaced for speed, or to be called early: an override that calls DeepSpeed's own, or does its
#: work, is as right.
SHORT_CUTS = (BEGIN, READY, "_loss_scale_update_and_overflow_cleanup", "_post_step")

#: Methods that stock calls from those and z3ext does not: an override would be passed by.
BYPASSED = (
    f"{PRIVATE}__avg_scatter_grads",
    "reduce_independent_p_g_buckets_and_remove_grads",
    "_apply_autoep_folding_tp_correction",
    f"{PRIVATE}__avg_scatter_contiguous_grads",
    "partition_grads",
    "get_grad_norm_direct",
    "_model_parallel_all_reduce",
)

#: The bucket's fields; z3ext keeps them as stock does.
BUCKET_FIELDS = ("buffer", "buffer_meta", "params", "elements", "process_group")

# The methods replaced, then those that z3ext calls or whose order of calls it counts on, with their
# hashes in DeepSpeed 0.19.8. ``python -m z3ext.deepspeed.fingerprint`` prints the
# table of the DeepSpeed that is installed; read what changed before adding a hash here.
KNOWN: dict[str, frozenset[str]] = {
    f"{PRIVATE}__add_grad_to_ipg_bucket": frozenset({"b0bb3880277715a5"}),
    f"{PRIVATE}__reduce_and_partition_ipg_grads": frozenset({"44703712e5fb1abe"}),
    "has_overflow": frozenset({"a31822c7787f9069"}),
    "_get_norm_groups": frozenset({"cf96a4e6e5b3993a"}),
    "_prepare_fp32_grad_for_sub_group": frozenset({"64d5bff072b91871"}),
    "unscale_and_clip_grads": frozenset({"ae4ec321851e6635"}),
    "_get_param_partition_group": frozenset({"32a3ee251b393e80"}),
    "_get_param_partition_rank": frozenset({"61b7766c564996fb"}),
    "_gradient_averaging_world_size": frozenset({"7518b60ff4de09e4"}),
    "_grad_norm_counts_every_rank": frozenset({"1c6c6f002343b28a"}),
    "_model_parallel_all_reduce": frozenset({"5468b255438d64c9"}),
    "_apply_autoep_folding_tp_correction": frozenset({"8bb6f571ef04719b"}),
    f"{PRIVATE}__avg_scatter_grads": frozenset({"56b0c8c520ccbf72"}),
    f"{PRIVATE}__avg_scatter_contiguous_grads": frozenset({"978691e2f5afe5cd"}),
    "partition_grads": frozenset({"c246f5b8bd51788f"}),
    "reduce_independent_p_g_buckets_and_remove_grads": frozenset({"ed2027bc7246ff6f"}),
    "reduce_ready_partitions_and_remove_grads": frozenset({"be81e9761c2def75"}),
    "independent_gradient_partition_epilogue": frozenset({"e7cba1addb0c0827"}),
    "_setup_for_real_optimizer": frozenset({"21504ef43b48b157"}),
    "backward_prologue": frozenset({"015f9f06ce0f4b2a"}),
    "_post_step": frozenset({"b2500f1c2ce7b5f8"}),
    "_pre_step": frozenset({"d6bf55b2add3b81c"}),
    "step": frozenset({"ab5b443489fe0a0d"}),
    "_overflow_check_and_loss_scale_update": frozenset({"884d46e37b33095a"}),
    "_loss_scale_update_and_overflow_cleanup": frozenset({"9aee078fc56cfdaf"}),
    "check_overflow": frozenset({"e624e458c9749597"}),
    "_check_overflow": frozenset({"322e102a0960100c"}),
    "_overflow_clean_up": frozenset({"360be175ed5ff4cb"}),
    "get_grad_norm_direct": frozenset({"01ca53b61da142ca"}),
    "_prepare_sub_group": frozenset({"8fd818ae69e776b5"}),
    "_release_sub_group": frozenset({"945c90f58d54bd35"}),
    "offload_states": frozenset({"df664649954c4360"}),
    "reload_states": frozenset({"87ec481a0de3a562"}),
    "get_param_comm_dtype": frozenset({"5279ce7b7eaaba7f"}),
}

#: Functions that the optimizer's module calls by name, and z3ext repeats.
KNOWN_FUNCTIONS: dict[str, frozenset[str]] = {
    "reduce_scatter_coalesced": frozenset({"b63144a362c92771"}),
}


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


def _layer_text(function: types.FunctionType) -> str:
    # torch's own decorators (no_grad) differ between its versions and are not DeepSpeed's matter.
    if function.__globals__.get("__name__", "").partition(".")[0] == "torch":
        return f"torch: {function.__code__.co_name}"
    # The code object's source: that of a function would be the source of what it wraps.
    source = textwrap.dedent(inspect.getsource(function.__code__))
    return repr(_normalised(ast.parse(source)))


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


def unknown_functions(cls: type) -> list[str]:
    """What of KNOWN_FUNCTIONS, in the module of an optimizer class, z3ext doesn't know, by name."""
    module = vars(sys.modules[cls.__module__])
    return [
        name
        for name, hashes in KNOWN_FUNCTIONS.items()
        if fingerprint(module.get(name)) not in hashes
    ]


def unknown_symbols(cls: type, bucket: type) -> list[str]:
    """What in an optimizer class, its module and its bucket class z3ext doesn't know, by name."""
    unknown = [
        f"{cls.__name__}.{name.removeprefix(PRIVATE)}"
        for name, hashes in KNOWN.items()
        if fingerprint(resolve(cls, name)) not in hashes
    ]
    unknown += unknown_functions(cls)
    fields = (
        tuple(field.name for field in dataclasses.fields(bucket))
        if dataclasses.is_dataclass(bucket)
        else ()
    )
    if fields != BUCKET_FIELDS:
        unknown.append(bucket.__name__)
    return unknown


def _print_table() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    for name in KNOWN:
        found = fingerprint(resolve(DeepSpeedZeroOptimizer_Stage3, name))
        key = f'f"{{PRIVATE}}{name[len(PRIVATE) :]}"' if name.startswith(PRIVATE) else f'"{name}"'
        print(f'    {key}: frozenset({{"{found}"}}),')


if __name__ == "__main__":
    _print_table()
