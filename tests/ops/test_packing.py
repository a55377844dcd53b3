"""Rows packed side by side: each unit once and whole, few lines, and each token attends as in its own row."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.kernels import learner as kernels
from jaxrl_llm.ops import packing

WIDTH, UNITS, MOST = 12, 9, 4
FIRST_FIT = jax.jit(lambda size: packing.first_fit(size, width=WIDTH, max_units=MOST))
LAY = jax.jit(packing.lay, static_argnames=("width", "group_size"))


def first_fit_by_hand(size):
    """Return lists of units: the longest unit first, each in the first line with room."""
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
    line = LAY(tokens, prompt_length, length, width=16, group_size=2)
    # The last tokens of completions, 3, 4 and 6, predict nothing: they have no place.
    assert line.tokens[0].tolist() == [7, 8, 1, 2, 9, 5] + [0] * 10
    assert line.position[0].tolist() == [0, 1, 2, 3, 0, 1] + [0] * 10
    assert line.completions.target[0].tolist() == [1, 2, 3, 4, 5, 6] + [0] * 10
    # What predicts them: the prompt's last token twice, for it has two completions.
    assert line.completions.source[0].tolist() == [1, 2, 3, 1, 4, 5] + [0] * 10
    # Of the prompts (7 8) and (9) there is one token that another predicts, once.
    assert line.prompts.target[0].tolist() == [8] + [0] * 15
    assert line.prompts.source[0].tolist() == [0] * 16
    assert [line.completions.count.tolist(), line.prompts.count.tolist()] == [[6], [1]]
    seen = packing.visible(line)[0]
    sees = [np.flatnonzero(seen[i]).tolist() for i in range(6)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4], [4, 5]]
    assert not np.asarray(seen[6:, :6]).any()
    last_two = kernels.by_window(line, {2}, line.position, "xla")[2][0]
    assert [np.flatnonzero(last_two[i]).tolist() for i in range(6)] == [[0], [0, 1], [1, 2], [2, 3], [4], [4, 5]]

    values = jnp.arange(1.0, 17.0)[None]
    rows = packing.take_rows(values, line.completions)[0]
    expected = [[0, 0, 1, 2, 3], [0, 0, 4, 0, 0], [0, 5, 6, 0, 0], [0] * 5, [0] * 5, [0] * 5]
    np.testing.assert_array_equal(rows, expected)
    rows = packing.take_rows(values, line.prompts)[0]
    np.testing.assert_array_equal(rows, [[0, 1, 0, 0, 0]] * 2 + [[0] * 5] * 4)


def test_the_prompts_of_a_line_are_read_one_after_the_other():
    # Three units of one row, prompts (1 2 3), (4) and (5 6 7), a completion token each.
    tokens = jnp.array([[[1, 2, 3, 9], [4, 9, 0, 0], [5, 6, 7, 9]]])
    line = LAY(tokens, jnp.array([[3, 1, 3]]), jnp.array([[4, 2, 4]]), width=12, group_size=1)
    assert line.tokens[0].tolist() == [1, 2, 3, 4, 5, 6, 7] + [0] * 5
    assert line.prompts.target[0].tolist() == [2, 3, 6, 7] + [0] * 8
    assert line.prompts.source[0].tolist() == [0, 1, 4, 5] + [0] * 8
    assert line.completions.source[0].tolist() == [2, 3, 6] + [0] * 9
    rows = packing.take_rows(jnp.arange(1.0, 13.0)[None], line.prompts)[0]
    np.testing.assert_array_equal(rows, [[0, 1, 2, 0], [0] * 4, [0, 3, 4, 0]])


def test_a_unit_takes_as_many_places_as_predict_or_are_predicted():
    # Prompts of 5, 1, 4 and 2 tokens: 5 + 2 + 0 places for 4 targets; 1 + 1 + 1 for 4; no row has any; 2 + 3 + 0 for 4.
    size = packing.unit_size(jnp.array([5, 1, 4, 2]), jnp.array([[3, 1], [2, 2], [0, 0], [4, 0]]))
    assert size.tolist() == [7, 4, 4, 5]


def test_a_full_line_of_short_prompts_loses_no_target():
    # Two units of a prompt of 1 and four completions of 2: 5 places each, and 8 targets, which fill the line.
    tokens = jnp.arange(1, 25).reshape(1, 8, 3)
    prompt_length, length = jnp.full((1, 8), 1), jnp.full((1, 8), 3)
    size = packing.unit_size(jnp.array([1, 1]), jnp.full((2, 4), 2))
    assert size.tolist() == [8, 8]
    line = LAY(tokens, prompt_length, length, width=16, group_size=4)
    assert line.completions.target[0].tolist() == np.asarray(tokens)[0, :, 1:].ravel().tolist()
    assert line.completions.source[0].tolist() == [0, 1, 0, 2, 0, 3, 0, 4, 5, 6, 5, 7, 5, 8, 5, 9]
