"""The tiers of the tests, and the compilation cache that their processes share."""

import os
import pathlib
import re

from support.compilation_cache import prune
from support.tiers import TIERS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "testing.md"


def test_the_page_lists_every_tier_in_the_order_of_ci():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(TIERS)


def test_a_large_cache_loses_the_entries_that_were_used_least_recently(tmp_path):
    for age, name in enumerate("dcba"):
        path = tmp_path / name
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    prune(tmp_path, 400)
    assert {path.name for path in tmp_path.iterdir()} == set("abcd")
    prune(tmp_path, 399)  # down to half
    assert {path.name for path in tmp_path.iterdir()} == {"d"}
    prune(tmp_path / "missing", 0)
