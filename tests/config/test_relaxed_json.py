"""Comments and trailing commas may stand anywhere, and change nothing."""

import json

from hypothesis import given
from hypothesis import strategies as st

from hadal.config.reading import parse, strict

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FILLERS = st.sampled_from(
    ["", " ", "\n", '/* } ] , " */', "// ,}\n", '# "quoted\n', "/**/", "\t/* a\nb */ "]
)


def rendered(value, draw):
    """Write a value with a filler between any two tokens, and commas before closing brackets."""

    def between(*tokens):
        return "".join(draw(FILLERS) + token for token in tokens)

    if isinstance(value, dict):
        inner = [
            between(json.dumps(name), ":") + rendered(below, draw) + between(",")
            for name, below in value.items()
        ]
        return between("{") + "".join(inner) + between("}")
    if isinstance(value, list):
        inner = [rendered(below, draw) + between(",") for below in value]
        return between("[") + "".join(inner) + between("]")
    return between(json.dumps(value))


@given(st.data(), VALUES)
def test_relaxed_json_equals_strict_json(data, value):
    assert parse(rendered(value, data.draw) + data.draw(FILLERS)) == value


@given(VALUES, st.integers(0, 2) | st.none())
def test_strict_json_is_unchanged(value, indent):
    text = json.dumps(value, indent=indent)
    assert strict(text) == text
    assert parse(text) == value


@given(st.text(alphabet='{}[],:"\\ab1#/*\n '))
def test_places_do_not_move(text):
    blanked = strict(text)
    assert len(blanked) == len(text)
    assert [i for i, c in enumerate(blanked) if c == "\n"] == [
        i for i, c in enumerate(text) if c == "\n"
    ]
