"""Rows laid side by side: each unit once and whole, few lines, and every token sees what it saw in its own row."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.ops import packing

WIDTH, UNITS, MOST = 12, 9, 4
FIRST_FIT = jax.jit(lambda size: packing.first_fit(size, width=WIDTH, max_units=MOST))


def first_fit_by_hand(size):
    """Lists of units, the longest first, each in the first line with room."""
    lines = []
    for unit in sorted((u for u in range(len(size)) if size[u]), key=lambda u: (-size[u], u)):
        for line in lines:
            if len(line) < MOST and sum(size[u] for u in line) + size[unit] <= WIDTH:
                line.append(unit)
                break
        else:
            lines.append([unit])
    return lines


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, WIDTH), min_size=UNITS, max_size=UNITS))
def test_units_go_to_the_first_line_with_room_the_longest_first(size):
    unit_of, num_lines = FIRST_FIT(jnp.array(size, jnp.int32))
    lines = [[int(u) for u in line if u >= 0] for line in unit_of]
    expected = first_fit_by_hand(size)
    assert int(num_lines) == len(expected)
    assert lines == expected + [[]] * (UNITS - len(expected))


def test_a_line_by_hand():
    # Two units of two rows in a line of 16: prompts (7 8) and (9), completions of 3, 1, 2 and 0 tokens; then nothing.
    tokens = jnp.array(
        [[[7, 8, 1, 2, 3], [7, 8, 4, -1, -1], [9, 5, 6, -1, -1], [9, -1, -1, -1, -1], [-1] * 5, [-1] * 5]]
    )
    prompt_length, length = jnp.array([[2, 2, 1, 1, 0, 0]]), jnp.array([[5, 3, 3, 1, 0, 0]])
    line = packing.lay(tokens, prompt_length, length, width=16, group_size=2)
    assert line.tokens[0].tolist() == [7, 8, 1, 2, 3, 4, 9, 5, 6] + [0] * 7
    assert line.position[0].tolist() == [0, 1, 2, 3, 4, 2, 0, 1, 2] + [0] * 7
    assert line.completions.target[0].tolist() == [1, 2, 3, 4, 5, 6] + [0] * 10
    # What predicts them: the prompt's last token twice, for it has two completions.
    assert line.completions.source[0].tolist() == [1, 2, 3, 1, 6, 7] + [0] * 10
    # Of the prompts (7 8) and (9) there is one token that another predicts, once.
    assert line.prompts.target[0].tolist() == [8] + [0] * 15
    assert line.prompts.source[0].tolist() == [0] * 16
    assert [line.completions.count.tolist(), line.prompts.count.tolist()] == [[6], [1]]
    seen = packing.visible(line)[0]
    sees = [np.flatnonzero(seen[i]).tolist() for i in range(9)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 5], [6], [6, 7], [6, 7, 8]]
    assert not np.asarray(seen[9:, :9]).any()

    values = jnp.arange(1.0, 17.0)[None]
    rows = packing.take_rows(values, line.completions)[0]
    expected = [[0, 0, 1, 2, 3], [0, 0, 4, 0, 0], [0, 5, 6, 0, 0], [0] * 5, [0] * 5, [0] * 5]
    np.testing.assert_array_equal(rows, expected)
    rows = packing.take_rows(values, line.prompts)[0]
    np.testing.assert_array_equal(rows, [[0, 1, 0, 0, 0]] * 2 + [[0] * 5] * 4)


def test_the_prompts_of_a_line_are_read_one_after_the_other():
    # Three units of one row, prompts (1 2 3), (4) and (5 6 7), a completion token each.
    tokens = jnp.array([[[1, 2, 3, 9], [4, 9, 0, 0], [5, 6, 7, 9]]])
    line = packing.lay(tokens, jnp.array([[3, 1, 3]]), jnp.array([[4, 2, 4]]), width=12, group_size=1)
    assert line.tokens[0].tolist() == [1, 2, 3, 9, 4, 9, 5, 6, 7, 9, 0, 0]
    assert line.prompts.target[0].tolist() == [2, 3, 6, 7] + [0] * 8
    assert line.prompts.source[0].tolist() == [0, 1, 6, 7] + [0] * 8
    rows = packing.take_rows(jnp.arange(1.0, 13.0)[None], line.prompts)[0]
    np.testing.assert_array_equal(rows, [[0, 1, 2, 0], [0] * 4, [0, 3, 4, 0]])
