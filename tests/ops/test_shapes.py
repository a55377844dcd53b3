"""Signatures declare the shapes of arrays, and in the tests every call is checked against them."""

import ast
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from jaxrl_llm.algorithms import corrections, surrogates
from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.ops import groups, masks, ring_buffer, sampling

PACKAGE = pathlib.Path(masks.__file__).parents[1]
# What they are given is mostly a record, whose shapes types.py says; what they return is an array at least.
OF_METHODS = [
    PACKAGE / "algorithms" / f"{name}.py"
    for name in (
        *("advantages", "aggregation", "corrections", "divergences"),
        *("draw_weights", "old_policies", "shaping", "surrogates"),
    )
]
MODULES = [
    *sorted((PACKAGE / "ops").glob("[!_]*.py")),
    *(PACKAGE / "algorithms" / f"{name}.py" for name in ("baselines", "critic")),
    *OF_METHODS,
]
# These say nothing of a shape. A name that its module gives to a type (``Drawn``, ``Terms``) says what that says.
BARE = {"Any", "Array", "ArrayLike", "PyTree", "ndarray", "object"}
SHAPED = {"Bool", "Float", "Float32", "Int", "Key", "Num", "Real", "Shaped", "UInt32"}


def public_functions(body, prefix):
    """Return name and node of each public function and method."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.FunctionDef):
                yield f"{prefix}.{node.name}", node
            else:
                yield from public_functions(node.body, f"{prefix}.{node.name}")


def named_types(body):
    """Return the types behind the names of a module."""
    return {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def says_its_shape(annotation, types):
    """Return whether every array in an annotation is in a jaxtyping type."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Name) and annotation.id in types:
        return says_its_shape(types[annotation.id], types)
    if isinstance(annotation, ast.Subscript):
        name = getattr(annotation.value, "id", None)
        if name in SHAPED:
            kind, shape = annotation.slice.elts
            return isinstance(shape, ast.Constant) and isinstance(shape.value, str) and ast.unparse(kind) != "Any"
        if name == "PyTree":
            leaf = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            return says_its_shape(leaf, types)
    if isinstance(annotation, ast.Name | ast.Attribute):
        return ast.unparse(annotation).rpartition(".")[2] not in BARE
    return all(says_its_shape(part, types) for part in ast.iter_child_nodes(annotation) if isinstance(part, ast.expr))


def speaks_of_a_shape(annotation, types):
    """Return whether an annotation contains a jaxtyping type."""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    return bool(names & SHAPED) or any(speaks_of_a_shape(types[name], types) for name in names & types.keys())


def without_shape(source, module):
    """Return the parts of a module's public signatures that may be arrays without a declared shape."""
    found, body = [], ast.parse(source).body
    types = named_types(body)
    for name, node in public_functions(body, module):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        found += [
            f"{name}: {arg.arg}"
            for arg in every
            if arg and arg.arg not in ("self", "cls") and not says_its_shape(arg.annotation, types)
        ]
        if not says_its_shape(node.returns, types):
            found.append(f"{name}: its result")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_public_functions_say_the_shape_of_every_array(path):
    left = list(without_shape(path.read_text(), path.stem))
    assert not left, left


def without_array(source, module):
    """Return the public functions of a module whose result has no shape."""
    body = ast.parse(source).body
    types = named_types(body)
    return [name for name, node in public_functions(body, module) if not speaks_of_a_shape(node.returns, types)]


@pytest.mark.parametrize("path", OF_METHODS, ids=lambda path: path.stem)
def test_functions_of_methods_say_the_shape_of_what_they_return(path):
    left = without_array(path.read_text(), path.stem)
    assert not left, left


@pytest.mark.parametrize(
    ("argument", "is_fine"),
    [
        ("", False),
        (": Any", False),
        (": jax.Array", False),
        (": jax.Array | None", False),
        (": np.ndarray", False),
        (": tuple[Array, int]", False),
        (": Callable[[jax.Array], int]", False),
        (": PyTree", False),
        (": PyTree[Array]", False),
        (": int | None", True),
        (': Float[Array, "B T"] | None', True),
        (': PyTree[Shaped[Array, "..."], " L"]', True),
        (': Callable[[Int[Array, " B"]], Bool[Array, " B"]]', True),
    ],
)
def test_what_counts_as_saying_it(argument, is_fine):
    assert without_shape(f"def f(x{argument}) -> int: ...", "m") == ([] if is_fine else ["m.f: x"])
    assert without_shape(f"def _f(x{argument}): ...", "m") == []


@pytest.mark.parametrize(
    ("result", "is_fine", "is_array"),
    [
        ("", False, False),
        (" -> int", True, False),
        (" -> Tokens", True, False),
        (" -> jax.Array", False, False),
        (" -> Bare", False, False),
        (" -> dict[str, Bare]", False, False),
        (" -> Half", False, True),
        (" -> tuple[Whole, int]", True, True),
        (' -> Float[Array, " B"]', True, True),
    ],
)
def test_a_name_says_what_its_type_says(result, is_fine, is_array):
    types = 'Bare = tuple[jax.Array, int]\nWhole = tuple[Float[Array, "B T"], int]\nHalf = tuple[Whole, Bare]\n'
    source = f"{types}def f(x: Tokens){result}: ...\ndef _f(x): ..."
    assert without_shape(source, "m") == ([] if is_fine else ["m.f: its result"])
    assert without_array(source, "m") == ([] if is_array else ["m.f"])


def test_shapes_and_types_that_do_not_fit_are_refused():
    three, two = jnp.ones(3, jnp.int32), jnp.ones(2, jnp.int32)
    refused = [
        lambda: masks.completion_mask(three, two, 4),
        lambda: masks.completion_mask(three, jnp.ones(3), 4),
        lambda: sampling.token_logp(jnp.zeros((2, 5)), three),
        lambda: ring_buffer.put({"x": jnp.zeros((2, 4, 3))}, jnp.zeros((2, 1), jnp.int32), {"x": jnp.zeros((2, 2, 3))}),
        lambda: groups.group_rows(three, jnp.ones(2, bool), 1),
        lambda: corrections.sequence_ratio(jnp.zeros((2, 3)), jnp.ones((2, 2), bool)),
        # What is in a record is checked by what is made of it.
        lambda: surrogates.reinforce(Tokens(three, three, three, three, three, three > 0)),
    ]
    for call in refused:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()
        with pytest.raises(jaxtyping.TypeCheckError):
            jax.eval_shape(call)


def test_a_process_of_its_own_checks_nothing():
    code = """
import sys
import jax.numpy as jnp
from jaxrl_llm.algorithms import surrogates
from jaxrl_llm.ops.masks import completion_mask
print(completion_mask(jnp.ones(3), jnp.ones(1), 4).shape, "beartype" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "(3, 4) False", done.stderr
