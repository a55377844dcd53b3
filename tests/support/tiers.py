"""The tiers of the tests. Every test is in one tier: `plain`, or the one that its mark names.

A test outside the plain suite names the plain test of the same law in its docstring or in a comment.
"""

from collections.abc import Collection, Iterable

import pytest

PLAIN = "plain"
# What each tier proves. launch/test.sh --tier=NAME runs one; .ci/run runs all of them in this order.
TIERS = {
    PLAIN: "every law once, on small sizes",
    "recipes": "every law for every recipe",
    "slow": "laws on more meshes, model families, sizes, settings and launchers",
    "compiler": "programs compiled for TPU slices by the TPU compiler",
    "extras": "what needs optional packages: quantised weights, buckets, search over documents, the site",
    "sandbox": "attacks on the sandbox and on its limits",
    "kills": "runs that are killed or stopped, and resumed",
    "learning": "examples whose reward must rise, one seed each",
    "hosts": "runs of several processes",
    "parity": "parity with PyTorch and other libraries, if they are installed",
}


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test: the nearest mark of its function, class or file decides."""
    mark = item.get_closest_marker("tier")
    if mark is not None:
        (name,) = mark.args
        if name not in TIERS:
            raise pytest.UsageError(f"{item.nodeid}: tier {name!r} must be one of {', '.join(TIERS)}")
        return name
    if item.get_closest_marker("torch"):
        return "parity"
    return "slow" if item.get_closest_marker("slow") else PLAIN


def mostly_in(tier: str, values: Iterable, *, plain: int | Collection = 1) -> list:
    """Return the values of a parametrised test: a few stay in the plain suite, and the others are in a tier.

    Args:
        values: a tuple holds the values of several parameters.
        plain: the values that stay in the plain suite, or how many of the first ones do.
    """
    values = list(values)
    if isinstance(plain, int):
        plain = values[:plain]
    params = []
    for value in values:
        marks = () if value in plain else (pytest.mark.tier(tier),)
        params.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return params
