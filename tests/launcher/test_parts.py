"""Small pure parts of the launcher: env files, cores, places, frames, lines, jobs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hadal.errors import LaunchError
from hadal.launcher.job import (
    Frame,
    Hello,
    HostEnded,
    Job,
    Lines,
    Program,
    ProgramKind,
    RankEnded,
    RankOutput,
    decoded,
    encoded,
    packed,
    program_in,
    said,
    share_in,
    share_of,
)
from hadal.launcher.node import variables_of
from hadal.launcher.place import RankPlace, cores_of, find_place, near_devices, read_cores
from hadal.launcher.variables import (
    expanded,
    of_env_files,
    passed_on,
    read_env_file,
    screen_of,
)

# ---- env files -------------------------------------------------------------------------------


AS_A_SHELL = r"""
# a comment

A=1
  export B=two
C="two  words"
D='$A "as it is"'
E=/opt/efa/lib64:$LD_LIBRARY_PATH
F=${A}x"$B y"'$B'
G="a \"quote\", a \$ and a \\"
H=a\ b\$c
I=x # a comment
J=x#y
K=
L=~/lib:~
M="~ # $NOWHERE"'it'"'"'s'
N=$
O=5$,6
E=$E:/usr/lib
P="\a"
"""


def test_an_env_file_means_what_it_means_to_a_shell(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(AS_A_SHELL)
    there = {"LD_LIBRARY_PATH": "/lib", "HOME": "/home/me", "PATH": os.environ["PATH"]}
    values = expanded(read_env_file(AS_A_SHELL, "file", {}), there)
    show = "; ".join(f'printf "%s\\0" "${key}"' for key in values)
    words = ["sh", "-c", f". ./file; {show}"]
    told = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True)
    assert list(values.values()) == told.stdout.split("\0")[:-1]
    assert list(values) == list("ABCDEFGHIJKLMNOP")


def test_deepspeeds_liberties_with_env_files() -> None:
    text = "A = b\nB=x=y (z); 'a  b' \r\n"
    assert expanded(read_env_file(text, "f", {})) == {"A": "b", "B": "x=y (z); a  b"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("A", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("export A", "expected KEY=VALUE"),
        ("unset A B=1", "expected KEY=VALUE"),
        ("A.b=1", "expected KEY=VALUE"),
        ("A='x", 'cannot read "\'x"'),
        ('A="x', "cannot read"),
        ("A=x`id`", "cannot read '`id`'"),
        ("A=$(id)", r"cannot read '\$\(id\)'"),
        ('A="x$(id)"', r"cannot read '\$\(id\)'"),
        ("A=${B:-c}", "put the value in single quotes"),
        ("A=$1", "cannot read"),
        (r"A=C:\x", "cannot read"),
    ],
)
def test_an_invalid_line_is_refused(line: str, told: str) -> None:
    with pytest.raises(LaunchError, match=rf"\.deepspeed_env, line 2: {told}|line 2.*{told}"):
        read_env_file(f"A=1\n{line}\n", ".deepspeed_env", {})


def test_hosts_replace_variables_that_no_file_sets() -> None:
    passed = passed_on({"NCCL_X": "a$b"})
    values = read_env_file("P=$NCCL_X:$LD\nQ='$LD'", "f", passed)
    assert expanded(values) == {"P": "a$b:${LD}", "Q": "$LD"}
    program = Program(words=("t.py",), folder="/")
    job = Job(program, {"a": (0,)}, variables=values)
    own = variables_of(share_of(job, "a", "a"), {"LD": "/host"}, cores=1)
    assert (own["P"], own["Q"]) == ("a$b:/host", "$LD")


def test_the_later_folder_and_file_win(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("A=1\nB=1\nC=1\n")
    (home / ".hadal_env").write_text("B=2\n")
    (here / ".deepspeed_env").write_text("C=3\n")
    names = (".deepspeed_env", ".hadal_env")
    assert of_env_files((home, here), names, {"D": "4"}) == dict(zip("DABC", "4123", strict=True))


def test_other_hosts_get_variables_by_prefix() -> None:
    told = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "HOME": "/root", "SECRET_KEY": "1"}
    assert passed_on(told) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/x"}


def test_ranks_get_the_size_of_the_terminal_less_their_prefix() -> None:
    screen = {"COLUMNS": "100", "LINES": "30"}
    assert screen_of(screen, {"a": (0,)}) == screen
    assert screen_of(screen, {"a": (0, 1)}) == {**screen, "COLUMNS": str(100 - len("[rank 1] "))}
    two = {"a": tuple(range(8)), "host": tuple(range(8))}
    assert screen_of(screen, two) == {**screen, "COLUMNS": str(100 - len("[host rank 15] "))}
    assert screen_of({"COLUMNS": "30"}, two) == {"COLUMNS": "40"}
    assert screen_of({}, two) == screen_of({"COLUMNS": ""}, two) == {}


# ---- cores -----------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 16))
def test_cores_are_divided_evenly(cores: set[int], ranks: int) -> None:
    if ranks > len(cores):
        with pytest.raises(LaunchError, match=f"{ranks} ranks cannot be bound"):
            cores_of(0, ranks, cores)
        return
    shares = [cores_of(rank, ranks, cores) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    together = [core for share in shares for core in share]
    assert together == sorted(cores)[: len(together)]
    assert len(cores) - len(together) < ranks


def test_a_list_of_cores() -> None:
    assert read_cores("0-3,8") == (0, 1, 2, 3, 8)
    for wrong in ("", "a", "3-1", "1,1", "0-3,2", "1-", "-2"):
        with pytest.raises(LaunchError, match="--bind_core_list"):
            read_cores(wrong)


def tree(folder: Path, nodes: dict[int, str], devices: dict[str, str]) -> Path:
    """Make the files of a host: the cores of its NUMA nodes, the node of each device."""
    for node, cores in nodes.items():
        place = folder / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cores}\n")
    for number, (device, node) in enumerate(devices.items()):
        information = folder / f"proc/driver/nvidia/gpus/{device}/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model:  NVIDIA H100\nGPU UUID:  GPU-{number}a7f\n")
        pci = folder / f"sys/bus/pci/devices/{device}"
        pci.mkdir(parents=True)
        (pci / "numa_node").write_text(f"{node}\n")
    return folder


FOUR = {"0000:1b:00.0": "0", "0000:43:00.0": "0", "0000:9c:00.0": "1", "0000:df:00.0": "1"}


def test_ranks_have_cores_of_their_device_s_numa_node(tmp_path: Path) -> None:
    root, usable = tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, FOUR), range(16)

    def cores(ranks: int, visible: str | None = None) -> list[tuple[int, ...]]:
        found = near_devices(ranks, visible, usable, root)
        assert not isinstance(found, str), found
        return [one.cores for one in found]

    first, second, third, fourth = (0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15)
    assert cores(4) == [first, second, third, fourth]
    assert cores(4, "3,0,1,2") == [third, first, second, fourth]
    assert cores(2, "2,1") == [third + fourth, first + second]  # each has a node alone
    assert cores(2, "GPU-3a7f, GPU-0") == [third + fourth, first + second]
    found = near_devices(1, "3", range(6), root)
    assert not isinstance(found, str) and found == [((4, 5), 1, "0000:df:00.0")]


@pytest.mark.parametrize(
    ("nodes", "devices", "visible", "why"),
    [
        ({0: "0-1", 1: "2-3"}, {}, None, "lists 0 visible devices for 2 ranks"),
        ({0: "0-1", 1: "2-3"}, FOUR, "MIG-1", "lists 0 visible devices for 2 ranks"),
        ({0: "0-1", 1: "2-3"}, FOUR, "0,7", "lists 1 visible devices for 2 ranks"),
        ({0: "0-3"}, FOUR, None, "there is one NUMA node"),
        ({0: "0-1", 1: "2-3"}, {"a": "-1", "b": "0"}, None, "NUMA nodes of devices are -1, 0"),
        ({0: "0", 1: "2-3"}, FOUR, None, "1 cores of NUMA node 0 may be used by 2 ranks"),
        ({0: "", 1: "2-3"}, FOUR, None, "0 cores of NUMA node 0 may be used by 2 ranks"),
    ],
)
def test_why_cores_are_not_those_of_a_device(
    nodes: dict[int, str], devices: dict[str, str], visible: str | None, why: str, tmp_path: Path
) -> None:
    found = near_devices(2, visible, range(4), tree(tmp_path, nodes, devices))
    assert isinstance(found, str) and why in found


# ---- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", RankPlace(3, 8, 1, 2)),
        (
            "SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2"
            " SLURM_STEP_TASKS_PER_NODE=2(x2),1",
            RankPlace(4, 5, 0, 1),
        ),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1"
            " OMPI_COMM_WORLD_LOCAL_SIZE=2",
            RankPlace(1, 4, 1, 2),
        ),
        ("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", RankPlace(2, 4, 0, 2)),
    ],
)
def test_a_place_is_read_from_any_launchers_variables(variables: str, place: RankPlace) -> None:
    told = dict(word.split("=", 1) for word in variables.split())
    assert find_place(told) == place
    assert find_place(place.variables()) == place


def test_without_a_launcher_there_is_no_rank() -> None:
    with pytest.raises(LaunchError, match="has no rank"):
        find_place({"RANK": "0"})


# ---- frames and lines ------------------------------------------------------------------------


@given(st.integers(0, 9), st.booleans(), st.binary(max_size=9000))
def test_output_is_split_into_short_frames(rank: int, is_error: bool, text: bytes) -> None:
    frames = list(said(rank, is_error, text))
    assert all(len(frame) <= 4096 and frame.count(b"\n") == 1 for frame in frames)
    back = [decoded(frame) for frame in frames]
    assert all(isinstance(f, RankOutput) and (f.rank, f.is_error) == (rank, is_error) for f in back)
    assert b"".join(f.text for f in back if isinstance(f, RankOutput)) == text


@pytest.mark.parametrize(
    "frame", [Hello(("1", "2"), ""), RankEnded(1, -9, True), HostEnded(1, "x\ny")]
)
def test_frames_round_trip(frame: Frame) -> None:
    assert decoded(encoded(frame)) == frame
    assert decoded(b"node7: " + encoded(frame)) == frame


@pytest.mark.parametrize(
    "line", [b"", b"loss 3", b"\x1ehadal", b"\x1ehadal {", b'\x1ehadal ["RankOutput", {"x": 1}]']
)
def test_other_lines_are_not_frames(line: bytes) -> None:
    assert decoded(line) is None


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"b c", b"\r\n"]), max_size=30), st.data())
def test_lines_are_the_same_however_they_arrive(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    lines = Lines()
    got = [line for piece in pieces for line in lines.feed(piece)]
    assert b"".join(got) + lines.rest == text
    assert [*got, *lines.rest.splitlines(keepends=True)] == text.splitlines(keepends=True)


def test_a_long_line_is_searched_once() -> None:
    """The time is linear in the length, not quadratic: 40 000 pieces of a few KB."""
    lines, piece = Lines(), b"x" * 2700
    began = time.process_time()
    for _ in range(40_000):
        assert lines.feed(piece) == []
    assert time.process_time() - began < 2
    assert lines.rest_nbytes == 40_000 * 2700
    assert len(lines.feed(b"\n")) == 1
    assert lines.rest == b""


# ---- jobs ------------------------------------------------------------------------------------


def program(**fields: object) -> Program:
    return Program(("train.py", "a b", "$x", "--", "'"), "/work", **fields)  # type: ignore[arg-type]


REST = ["a b", "$x", "--", "'"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["py", "-u", "train.py", *REST]),
        ({"passes_local_rank": True}, ["py", "-u", "train.py", "--local_rank=1", *REST]),
        ({"kind": ProgramKind.MODULE}, ["py", "-u", "-m", "train.py", *REST]),
        (
            {"kind": ProgramKind.MODULE, "passes_local_rank": True},
            ["py", "-u", "-m", "train.py", "--local_rank=1", *REST],
        ),
        ({"kind": ProgramKind.BARE}, ["train.py", *REST]),
        (
            {"kind": ProgramKind.BARE, "passes_local_rank": True},
            ["train.py", "--local_rank=1", *REST],
        ),
        ({"as_deepspeed": True}, ["py", "-u", "-m", "hadal.compat", "train.py", *REST]),
        (
            {"as_deepspeed": True, "kind": ProgramKind.MODULE, "passes_local_rank": True},
            ["py", "-u", "-m", "hadal.compat", "-m", "train.py", "--local_rank=1", *REST],
        ),
    ],
)
def test_the_words_of_a_rank(fields: dict[str, object], words: list[str]) -> None:
    own = program(**fields)
    assert own.command(1, "py") == words
    assert program_in(packed(own)) == own


def test_a_share_is_one_hosts_part_of_the_job() -> None:
    job = Job(program(cores=(1, 2)), {"a": (0, 1), "b": (3,)}, {"X": "1"}, port=7)
    assert job.world_size == 3
    assert [list(job.ranks_of(host)) for host in "ab"] == [[0, 1], [2]]
    share = share_of(job, "b", "10.0.0.1")
    assert (share.node_rank, share.nodes, share.slots, share.port) == (1, 2, (3,), 7)
    assert share_in(packed(share)) == share
    told = variables_of(share, {}, cores=8)
    assert told["CUDA_VISIBLE_DEVICES"] == told["ASCEND_RT_VISIBLE_DEVICES"] == "3"
    assert told["X"] == "1"
    assert told["OMP_NUM_THREADS"] == "8"
    assert variables_of(share, {"OMP_NUM_THREADS": "3"}, 8)["OMP_NUM_THREADS"] == "3"
