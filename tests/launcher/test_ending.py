"""The report of a job's end: the first failure in full, the others folded."""

from __future__ import annotations

import io
import signal

import pytest
from hypothesis import given, strategies as st

from hadal.launcher.ending import Failure, error_in, report, runs, worst
from hadal.launcher.job import where_hadal_is
from hadal.launcher.printing import HOLD_S, Printer

TRACE = "Traceback (most recent call last):\n  File x\nValueError: bad sample"


def test_the_first_failure_is_whole_and_the_others_are_folded() -> None:
    lost = "Traceback (most recent call last):\nRuntimeError: peer gone"
    failures = [
        Failure(0, "a", 1, 5.0, lost),
        Failure(3, "b", 1, 4.0, TRACE),
        Failure(2, "b", 1, 6.0, lost),
        Failure(4, "c", -11, 7.0, ""),
    ]
    lines = report(failures, names_hosts=True)
    assert lines[0] == "rank 3 on b failed first: exit code 1"
    assert "\n".join(line[2:] for line in lines[1:4]) == TRACE
    assert lines[4:6] == [
        "ranks 0, 2 on a, b failed after it, exit code 1: RuntimeError: peer gone",
        "rank 4 on c failed after it, ended by SIGSEGV: ended by SIGSEGV",
    ]
    assert lines[6].startswith("hint: --enable_each_rank_log DIR")
    assert "/logs" in report(failures, names_hosts=False, logs="/logs")[-1]


def test_repeats_are_folded_and_cut_at_whole_words() -> None:
    def failure(rank: int, message: str) -> Failure:
        return Failure(rank, "a", 1, float(rank), f"{TRACE}\n{message}".replace("ValueError", "E"))

    same = [failure(rank, f"rank {rank}: of 12") for rank in range(3)]
    lines = report([*same, failure(12, "rank 12: of 12")], names_hosts=False)
    assert "ranks 1-2, 12 failed with the same error" in lines
    told = "rank 0: stage 1, rank 1: stage 2"
    lines = report([failure(0, told), failure(1, told)], names_hosts=False)
    assert "rank 1 failed with the same error" in lines
    long = failure(1, " ".join(["another"] * 60))
    (line,) = (x for x in report([same[0], long], names_hosts=False) if x.startswith("rank 1 "))
    assert line.endswith("another another ...") and len(line) < 230


def test_an_error_of_ours_comes_before_the_users_frames() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/job/data.py", line 3, in batch\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 7, in <module>\n    step()\n    ~~~~^^\n'
        f'  File "{where_hadal_is()}/hadal/engine/engine.py", line 9, in step\n    raise\n'
        '  File "/v/lib/python3.12/site-packages/torch/x.py", line 9, in f\n    raise\n'
        '  File "<string>", line 1, in <module>\n'
        "hadal.errors.UsageError: two\n  lines\n"
        "[W1123 torch says goodbye]\n"
    )
    failures = [Failure(0, "a", 1, 0.0, text)]
    assert report(failures, names_hosts=False, folder="/job") == [
        "rank 0 failed first: UsageError: two",
        "    lines",
        "  raised by this program at",
        '    File "train.py", line 7, in <module>',
        "      step()",
        "hint: HADAL_TRACEBACK=full shows the frames inside Hadal, too",
    ]
    assert failures[0].reason == "UsageError: two lines"
    full = report(failures, names_hosts=False, is_full=True)
    assert full == ["rank 0 failed first: exit code 1", *(f"  {x}" for x in text.splitlines())]
    theirs = text.replace("hadal.errors.UsageError", "their.UsageError")
    lines = report([Failure(0, "a", 1, 0.0, theirs)], names_hosts=False)
    assert lines[0] == "rank 0 failed first: exit code 1"


@pytest.mark.parametrize("text", ["", "no traceback", "Traceback (most recent call last):\n  File"])
def test_text_without_a_traceback_has_no_error(text: str) -> None:
    assert error_in(text) is None


def test_a_silent_death_is_ordered_before_later_tracebacks() -> None:
    dead = Failure(1, "a", -9, 10.2, "", has_traceback=False)
    follower = Failure(0, "a", 1, 10.0, TRACE)
    assert report([follower, dead], names_hosts=False)[0].startswith("rank 1 failed first")
    earlier = Failure(2, "a", 1, 9.0, TRACE)
    assert report([earlier, dead], names_hosts=False)[0].startswith("rank 2 failed first")


def test_a_hint_is_given() -> None:
    wrong = "usage: t.py\nt.py: error: unrecognized arguments: --local_rank=0"
    assert "add --no_local_rank" in report([Failure(0, "a", 2, 0, wrong)], names_hosts=False)[-1]
    wrong = "usage: t.py\nt.py: error: the following arguments are required: --local_rank"
    assert "add --local_rank" in report([Failure(0, "a", 2, 0, wrong)], names_hosts=False)[-1]
    assert "memory" in report([Failure(0, "a", -9, 0, "")], names_hosts=False)[-1]


def test_ranks_that_ran_fewer_steps_are_named_first() -> None:
    error = "hadal.errors.CommunicationError: all ranks to come failed (with rank 0)"
    waited = TRACE.replace("ValueError: bad sample", error)
    failures = [Failure(1, "a", 1, 0, waited), Failure(3, "a", 1, 1, waited)]
    line, following, *_ = report(failures, names_hosts=False, succeeded={0, 2})
    assert line.startswith("ranks 0, 2 finished while ranks 1, 3 still trained: the ranks ran diff")
    assert following.startswith("rank 1 failed first")
    (line, *_) = report(failures[:1], names_hosts=False, succeeded={0})
    assert line.startswith("rank 0 finished while rank 1 still trained")
    for told in (
        report([Failure(1, "a", 1, 0, TRACE)], names_hosts=False, succeeded={0}),
        report(failures, names_hosts=False),
    ):
        assert told[0].startswith("rank 1 failed first")


def test_the_exit_code_is_the_worst() -> None:
    assert worst([]) == 0
    assert worst([Failure(0, "a", 1, 0, ""), Failure(1, "a", 3, 0, "")]) == 3
    assert worst([Failure(0, "a", 1, 0, ""), Failure(1, "a", -signal.SIGKILL, 0, "")]) == 137


@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_of_numbers(numbers: set[int]) -> None:
    back = set()
    for part in runs(numbers).split(", "):
        first, _, last = part.partition("-")
        back |= set(range(int(first), int(last or first) + 1))
    assert back == numbers


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def printer(prefix: str) -> tuple[Printer, io.BytesIO, io.BytesIO, Clock]:
    out, error, clock = io.BytesIO(), io.BytesIO(), Clock()
    return Printer(out, error, lambda _, rank: prefix.format(rank), clock), out, error, clock


def test_each_line_begins_with_its_rank() -> None:
    shown, out, error, _ = printer("[{}] ")
    shown.said("h", 0, False, b"one\ntw")
    shown.said("h", 1, False, b"other\r")
    shown.said("h", 0, False, b"o\n")
    shown.said("h", 1, True, b"careful\n")
    assert out.getvalue() == b"[0] one\n[0] two\n"
    shown.said("h", 1, False, b"50%\r\nunended")
    shown.ended("h", 1, shows=True)
    assert out.getvalue() == b"[0] one\n[0] two\n[1] other\r[1] 50%\r\n[1] unended\n"
    assert error.getvalue() == b"[1] careful\n"


def test_a_single_ranks_output_is_shown_at_once() -> None:
    shown, out, error, _ = printer("")
    for piece in (b"Epoch 1 ", b"..", b" done\n", b"\xff"):
        shown.said("h", 0, False, piece)
        shown.said("h", 0, True, piece)
    assert out.getvalue() == error.getvalue() == b"Epoch 1 .. done\n\xff"


def test_a_line_without_an_end_is_cut() -> None:
    shown, out, _, _ = printer("[{}] ")
    for _ in range(3):
        shown.said("h", 0, False, b"x" * 600_000)
    assert out.getvalue() == b"[0] " + b"x" * 1_200_000 + b"\n"


def test_a_traceback_waits_for_its_ranks_end() -> None:
    shown, _, error, clock = printer("[{}] ")
    text = TRACE.encode() + b"\n"
    for at in range(0, len(text), 7):
        shown.said("h", 2, True, text[at : at + 7])
        clock.now += 0.01
    shown.look()
    assert error.getvalue() == b""
    began, told = shown.ended("h", 2, shows=False)
    assert told == TRACE
    assert began is not None and 100 < began < 100.1
    assert error.getvalue() == b""


def test_torchs_own_prefix_and_colours_are_removed() -> None:
    shown, _, _, _ = printer("[{}] ")
    text = TRACE.replace("ValueError", "\x1b[1;35mValueError\x1b[0m")  # FORCE_COLOR, Python 3.13
    shown.said("h", 1, True, "".join(f"[rank1]: {row}\n" for row in text.split("\n")).encode())
    assert shown.ended("h", 1, shows=False)[1] == TRACE


def test_a_rank_that_survives_a_traceback_shows_it() -> None:
    shown, _, error, clock = printer("[{}] ")
    shown.said("h", 0, True, TRACE.encode() + b"\n")
    clock.now += HOLD_S + 0.1
    shown.look()
    assert error.getvalue().startswith(b"[0] Traceback")
    shown.said("h", 0, True, b"going on\n")
    assert error.getvalue().endswith(b"[0] ValueError: bad sample\n[0] going on\n")
    assert shown.ended("h", 0, shows=True)[1] == TRACE


def test_of_ranks_that_survive_only_the_first_traceback_is_whole() -> None:
    shown, _, error, clock = printer("[{}] ")
    for rank in (1, 0, 2):  # the order in which they print
        shown.said("h", rank, True, TRACE.encode() + b"\n")
        clock.now += 1
    clock.now += HOLD_S
    shown.look()
    shown.said("h", 0, True, b"going on\n")
    first = "".join(f"[1] {line}\n" for line in TRACE.split("\n"))
    folded = [f"[{rank}] (traceback folded) ValueError: bad sample\n" for rank in (0, 2)]
    assert error.getvalue().decode() == "".join([first, *folded, "[0] going on\n"])
    assert [shown.has_shown("h", rank) for rank in range(3)] == [False, True, False]
    assert [shown.ended("h", rank, shows=False)[1] for rank in range(3)] == [TRACE] * 3
    clock.now += HOLD_S
    shown.said("h", 2, True, b"\n" + TRACE.encode() + b"\n")  # for another reason
    shown.ended("h", 2, shows=True)
    assert error.getvalue().endswith("".join(f"[2] {x}\n" for x in TRACE.split("\n")).encode())


def test_frames_that_were_shown_need_no_hint() -> None:
    text = f"{TRACE}\nTraceback (most recent call last):\n  File x\nhadal.errors.UsageError: no"
    for is_shown in (False, True):
        failure = Failure(0, "a", 1, 0.0, text, is_shown=is_shown)
        lines = report([failure], names_hosts=False)
        assert any("HADAL_TRACEBACK=full" in line for line in lines) is not is_shown


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_left_of_a_bar_on_a_terminal() -> None:
    screen = Terminal()
    shown = Printer(screen, screen, lambda _, rank: f"[{rank}] ", Clock())
    for piece in (b"\r50%|#####     |", b"\r100%|", b"\rdone\n", b"\r0%|", b"\r", b" "):
        shown.said("h", 0, True, piece)
    shown.said("h", 1, False, b"loss 1\n")
    clear = b"\x1b[K"
    first = [b"[0] 50%|#####     |\r", b"[0] 100%|\r"]
    then = [b"[0] done\n[0] 0%|\r", b"[1] loss 1\n"]
    assert screen.getvalue() == clear.join([*first, *then])
    shown.said("h", 1, True, b"\r1%|\r2%")
    shown.begin_line()
    assert screen.getvalue().endswith(b"[1] 1%|\r" + clear)
    plain, _, error, _ = printer("[{}] ")
    plain.said("h", 0, True, b"\r 50%|\r100%|\n")
    assert clear not in error.getvalue()


def test_one_ranks_unended_line_gets_its_end_before_ours() -> None:
    screen = Terminal()
    shown = Printer(screen, screen, lambda _, rank: "", Clock())
    shown.said("h", 0, True, b"\r 50%|#####")
    shown.begin_line()
    shown.begin_line()
    assert screen.getvalue() == b"\r\x1b[K 50%|#####\n"


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    shown, _, _, _ = printer("[{}] ")
    shown.said("h", 0, True, b"".join(b"%d\n" % n for n in range(50)))
    began, told = shown.ended("h", 0, shows=False)
    assert began is None
    assert told.split() == [str(n) for n in range(30, 50)]
