"""Hostfiles, and the selection of slots by `--include` and `--exclude`."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hadal.errors import LaunchError
from hadal.launcher.hosts import Pool, filtered, narrowed, read_hostfile

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
POOLS = st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=4).map(
    lambda sizes: {host: tuple(range(size)) for host, size in sizes.items()}
)
POOL: Pool = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "c": (0, 1)}


@st.composite
def chosen(draw: st.DrawFn) -> tuple[Pool, dict[str, set[int]], str]:
    """Draw a pool, a selection of its slots, and a text that selects them."""
    pool = draw(POOLS)
    named: dict[str, set[int]] = {}
    parts = []
    for host in draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, max_size=6)):
        slots = draw(st.lists(st.sampled_from(pool[host]), max_size=6))
        named.setdefault(host, set()).update(slots or pool[host])
        parts.append(f"{host}:{','.join(map(str, slots))}" if slots else host)
    return pool, named, "@".join(parts)


@given(chosen())
def test_an_inclusion_keeps_the_named_slots_in_the_pools_order(
    case: tuple[Pool, dict[str, set[int]], str],
) -> None:
    pool, named, text = case
    left = filtered(pool, include=text)
    assert left == {host: tuple(sorted(slots)) for host, slots in named.items()}
    assert list(left) == [host for host in pool if host in named]


@given(chosen())
def test_an_exclusion_keeps_the_rest(case: tuple[Pool, dict[str, set[int]], str]) -> None:
    pool, named, text = case
    rest = {h: tuple(s for s in own if s not in named.get(h, ())) for h, own in pool.items()}
    rest = {host: slots for host, slots in rest.items() if slots}
    if not rest:
        with pytest.raises(LaunchError, match="no slot is left"):
            filtered(pool, exclude=text)
    else:
        left = filtered(pool, exclude=text)
        assert list(left.items()) == list(rest.items())


@given(POOLS, st.sampled_from(["", "  # with a comment", " max=9", "\t"]))
def test_a_hostfile_is_read_in_its_order(pool: Pool, behind: str) -> None:
    lines = [f"{host} \t slots={len(slots)}{behind}" for host, slots in pool.items()]
    text = "# the hosts\n\n" + "\n   \n".join(lines)
    assert list(read_hostfile(text).items()) == list(pool.items())


@given(POOLS, st.integers(1, 5), st.integers(1, 5))
def test_the_first_nodes_are_kept_with_the_requested_slots(
    pool: Pool, nodes: int, slots: int
) -> None:
    if nodes > len(pool):
        with pytest.raises(LaunchError, match=f"--num_nodes {nodes}, but there are {len(pool)}"):
            narrowed(pool, nodes, slots)
        return
    kept = narrowed(pool, nodes, slots)
    assert list(kept) == list(pool)[:nodes]
    assert set(kept.values()) == {tuple(range(slots))}
    assert narrowed(pool) == pool


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("a slots=2\nb\n", "line 2: expected `NAME slots=N`, found 'b'"),
        ("-oProxyCommand=x slots=2\n", "line 1: '-oProxyCommand=x' is not the name of a host"),
        ("a slots=1\n^/etc/passwd slots=2", r"line 2: '\^/etc/passwd' is not the name"),
        ("a,b slots=2", "line 1: 'a,b' is not the name of a host"),
        ("a,evil:4 slots=2", "line 1: 'a,evil:4' is not the name"),
        ("evil:4 slots=2", "line 1: 'evil:4' is not the name"),
        ("x@-oProxyCommand=y slots=2", "line 1"),
        ("h$(touch${IFS}X) slots=2", "line 1"),
        ("a slots=x", "line 1"),
        ("a slots=2x", "line 1"),
        ("a slot=2", "line 1"),
        ("slots=2", "line 1"),
        ("a slots=2\na slots=1", "line 2: the host 'a' is listed twice"),
    ],
)
def test_invalid_hostfiles_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"hosts.txt.*{told}"):
        read_hostfile(text, "hosts.txt")


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ({"include": "a", "exclude": "b"}, "contradict"),
        ({"include": "d"}, "no host 'd'; there are a, b, c"),
        ({"include": "c:2"}, "c has no slot 2; it has c:0,1"),
        ({"exclude": "a@c:0,9"}, "c has no slot 9"),
        ({"include": "a:"}, "cannot read 'a:'"),
        ({"include": "a@@b"}, "cannot read ''"),
        ({"include": "a:0-2"}, "cannot read 'a:0-2'"),
        ({"include": "a:0:1"}, "cannot read"),
        ({"exclude": "a@b@c"}, "no slot is left"),
    ],
)
def test_invalid_filters_are_refused(filters: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        filtered(POOL, **filters)


def test_names_of_hosts() -> None:
    names = ["worker-1", "n1.cluster.example", "10.0.0.7", "me@n2", "fe80::1%eth0", "::1", "gpu_3"]
    assert list(read_hostfile("".join(f"{name} slots=1\n" for name in names))) == names


def test_examples_of_the_grammar() -> None:
    assert filtered(POOL, include="b@a:0,2") == {"a": (0, 2), "b": (0, 1, 2, 3)}
    assert filtered(POOL, include="a:3@a:1,1") == {"a": (1, 3)}
    assert filtered(POOL, exclude="b:0@c") == {"a": (0, 1, 2, 3), "b": (1, 2, 3)}
    assert filtered(POOL) == POOL
