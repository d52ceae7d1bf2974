"""Runs other people's programs and tests, unmodified, on Hadal, and writes docs/compatibility.md.

Its interpreter is the one of an environment with these programs, Hadal and the distribution
compat/deepspeed-stub; `make suites` makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rows import SUITES, Program, Suite

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "docs/compatibility.md"
HEAD = "| suite | version | what ran | passed | failed | skipped | date | why not all |"
LIMIT_S = 600


@dataclass(frozen=True)
class Case:
    """A test or a program, how it ended (passed, failed, skipped), and why."""

    name: str
    end: str
    why: str = ""


# ---- running -------------------------------------------------------------------------------------


def environment(work: Path, interpreter: Path) -> dict[str, str]:
    """Return the variables of a run: CPUs, no network, the interpreter's commands first."""
    paths = [str(interpreter.parent), os.environ.get("PATH", "")]
    return {
        "TORCH_EXTENSIONS_DIR": str(interpreter.parents[1] / "torch_extensions"),
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(HERE),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "4",  # the number of devices that a test of DeepSpeed may use
        "DS_UNITTEST_TIMEOUT": "60",
        "HF_HOME": str(work / "inputs"),
        "HF_HUB_OFFLINE": "1",
        "INPUTS": str(work / "inputs"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(
    command: list[str], folder: Path, variables: Mapping[str, str], limit_s: float = LIMIT_S
) -> tuple[int | None, str]:
    """Run a command with all that it starts; return its exit code, None if it hung, and output."""
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, log.read_text(errors="replace")


def last_error(output: str) -> str:
    """Return the line that names the error of a program; the launcher's own lines say nothing."""
    named = re.findall(
        r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)", output, re.M
    )
    told = [line for line in named if "ChildFailedError" not in line]
    return (told[-1] if told else output.strip()[-160:])[:160]


def run_tests(
    suite: Suite, files: list[str], folder: Path, variables: Mapping[str, str]
) -> list[Case]:
    """Run files or folders of tests in one pytest."""
    report = folder / "report.xml"
    command = ["python", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "-W", "ignore", f"--junitxml={report}"]
    code, output = run([*command, *suite.options, *files], folder, variables, LIMIT_S * len(files))
    if not report.exists():
        return [Case(suite.name, "failed", "timeout" if code is None else last_error(output))]
    return list(read_report(report))


def read_report(report: Path) -> Iterator[Case]:
    """Read how each test ended from pytest's report."""
    for test in ElementTree.parse(report).iter("testcase"):
        name = f"{test.get('classname')}::{test.get('name')}"
        told = {part.tag: part for part in test}
        bad = told.get("failure", told.get("error"))
        if bad is not None:
            lines = [line for line in (bad.text or "").splitlines() if line.startswith("E ")]
            why = (lines or [bad.get("message", "")])[0].removeprefix("E").strip()
            yield Case(name, "failed", why[:160].rstrip())
        elif "skipped" in told:
            yield Case(name, "skipped", told["skipped"].get("message", "")[:200])
        else:
            yield Case(name, "passed")


def words_of(program: Program, variables: Mapping[str, str]) -> list[str]:
    launched = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={program.ranks}"]
    words = [word.format_map({"inputs": variables["INPUTS"]}) for word in program.words.split()]
    return ["python", *(launched if program.ranks else []), *words]


def run_program(program: Program, folder: Path, variables: Mapping[str, str]) -> Case:
    code, output = run(words_of(program, variables), folder, variables)
    if code == 0:
        return Case(program.name, "passed")
    return Case(program.name, "failed", "timeout" if code is None else last_error(output))


def prepare(suite: Suite, folder: Path, checkouts: Path, interpreter: Path) -> dict[str, str]:
    """Fill a suite's folder with copies of its files; return the variables of its runs."""
    own = folder / "packages"
    if suite.packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", own]
        subprocess.run([*pip, *suite.packages], check=True)
    paths = {str(own): None}
    for part in suite.copied:
        source, place = checkouts / suite.repository.split("/")[1] / part, folder / part
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(source), str(place.parent)], check=True)
        paths[str(place.parent)] = None
    for name, text in suite.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folder.mkdir(exist_ok=True)
    variables = environment(folder.parent, interpreter)
    variables["PYTHONPATH"] = os.pathsep.join([*paths, variables["PYTHONPATH"]])
    if suite.itself:  # operations of these sources, which others would compile again
        variables["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    return variables


def run_suite(suite: Suite, folder: Path, checkouts: Path, interpreter: Path) -> list[Case]:
    """Run all of a suite in a folder of its own."""
    variables = prepare(suite, folder, checkouts, interpreter)
    files = {path for each in suite.tests for path in folder.glob(each)}
    files -= {path for each in suite.without for path in folder.glob(each)}
    names = sorted(str(path.relative_to(folder)) for path in files)
    cases = run_tests(suite, names, folder, variables) if names else []
    for program in suite.programs:
        cases.append(run_program(program, folder, variables))
        print(f"  {program.name}: {cases[-1].end} {cases[-1].why}", flush=True)
    return cases


def measure(suite: Suite, work: Path, checkouts: Path, deepspeed: Path) -> tuple[str, list[Case]]:
    """Run a suite; return what ran and how it ended.

    Of a library's own tests those are counted that pass on the library itself.
    """
    cases = run_suite(suite, work / suite.name, checkouts, Path(sys.executable))
    if not suite.itself:
        return suite.what, cases
    python = deepspeed / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no {python}: `make suites` makes it")
    whole = replace(suite, copied=suite.copied + suite.itself)
    theirs = run_suite(whole, work / f"{suite.name}-itself", checkouts, python)
    found = {case.name: case for case in cases}
    lost = Case("", "failed", "its file cannot be read, or timed out")
    counted = [found.get(case.name, lost) for case in theirs if case.end == "passed"]
    return f"{suite.what}; {len(counted)} of {len(theirs)} pass on DeepSpeed itself", counted


# ---- the same losses as DeepSpeed ----------------------------------------------------------------


def losses(program: Program, folder: Path, variables: Mapping[str, str]) -> list[float]:
    """Return the loss of every step, as the Trainer keeps or Megatron prints it."""
    code, output = run(words_of(program, variables), folder, variables)
    if code != 0:
        raise SystemExit(f"{program.name} failed in {folder}:\n{last_error(output)}")
    printed = re.findall(r"\| lm loss: (\S+)", output)
    if printed:
        return [float(loss) for loss in printed]
    state = max(folder.glob("out/checkpoint-*/trainer_state.json"))
    history = json.loads(state.read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def compare(work: Path, checkouts: Path, deepspeed: Path) -> list[Case]:
    """Train with both libraries, program by program, and compare the loss of every step."""
    cases = []
    for suite in SUITES:
        compared = [program for program in suite.programs if program.tolerance]
        if not compared or not is_there(suite, checkouts):
            continue
        variables = [
            prepare(suite, work / suite.name, checkouts, interpreter)
            for interpreter in (Path(sys.executable), deepspeed / "bin" / "python")
        ]
        if suite.compared_with:
            path = checkouts / suite.compared_with
            variables[1]["PYTHONPATH"] = f"{path}{os.pathsep}{variables[1]['PYTHONPATH']}"
        for program in suite.programs:
            if program.ranks == 0:
                run_program(program, work / suite.name, variables[0])
            if program not in compared:
                continue
            ours, theirs = (losses(program, work / suite.name, each) for each in variables)
            apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            end = "passed" if apart <= program.tolerance else "failed"
            cases.append(Case(program.name, end, f"{len(ours)} losses, at most {apart:.1e} apart"))
            print(f"  {program.name}: {cases[-1].end}, {cases[-1].why}", flush=True)
    return cases


# ---- the table -----------------------------------------------------------------------------------


def reason_of(suite: Suite, case: Case) -> str:
    text = f"{case.name} {case.why}"
    return next((kind for look, kind in suite.kinds.items() if re.search(look, text)), case.why)


def reasons(suite: Suite, cases: list[Case]) -> str:
    """Return why not all passed, in a table's cell: the most frequent reasons first."""
    counted = Counter(reason_of(suite, case) for case in cases if case.end != "passed")
    told = [f"{count} × {why}" for why, count in counted.most_common(len(suite.kinds) or 4)]
    if len(counted) > len(told):
        told.append(f"{len(counted) - len(told)} further reasons")
    return "; ".join(told).replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def row_of(suite: Suite, what: str, cases: list[Case], today: str) -> str:
    ends = Counter(case.end for case in cases)
    counts = [str(ends[end]) for end in ("passed", "failed", "skipped")]
    cells = [suite.name, suite.version, what, *counts, today, reasons(suite, cases)]
    return "| " + " | ".join(cells) + " |"


def write_row(name: str, row: str) -> None:
    """Replace a suite's row in the table; rows of suites that did not run stay."""
    before, head, after = TABLE.read_text().partition(HEAD)
    lines = after.splitlines()
    end = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith("|")), len(lines))
    kept = {line.split("|")[1].strip(): line for line in lines[2:end]}
    kept[name] = row
    order = [suite.name for suite in SUITES] + sorted(set(kept) - {s.name for s in SUITES})
    rows = [kept[name] for name in order if name in kept]
    TABLE.write_text("\n".join([before + head, lines[1], *rows, *lines[end:]]) + "\n")


def is_there(suite: Suite, checkouts: Path) -> bool:
    folder = checkouts / suite.repository.rpartition("/")[2]
    if suite.repository and not folder.is_dir():
        print(f"  not run: put {suite.repository}, {suite.version}, into {folder}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"all if none: {[s.name for s in SUITES]}")
    parser.add_argument("--work", type=Path, required=True, help="folder for what programs write")
    parser.add_argument("--checkouts", type=Path, default=ROOT / ".checkouts")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / ".venv-deepspeed")
    parser.add_argument("--list", action="store_true", help="print every test and how it ended")
    arguments = parser.parse_args()
    work, checkouts = arguments.work.resolve(), arguments.checkouts.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "inputs/lines.txt").exists():
        subprocess.run([sys.executable, HERE / "inputs.py", work / "inputs"], check=True)
    today, bad = datetime.date.today().isoformat(), []
    known = {suite.name: suite for suite in SUITES}
    for name in arguments.names or [*known, "losses"]:
        print(name, flush=True)
        if name == "losses":
            both = compare(work, checkouts, arguments.deepspeed.absolute())
            bad += [case.name for case in both if case.end != "passed"]
            continue
        suite = known[name]
        if not is_there(suite, checkouts):
            continue
        for folder in (work / name, work / f"{name}-itself"):
            shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        what, cases = measure(suite, work, checkouts, arguments.deepspeed.absolute())
        write_row(name, row_of(suite, what, cases, today))
        passes = sum(case.end == "passed" for case in cases)
        for case in cases if arguments.list or passes < suite.passes else ():
            print(f"  {case.end} {case.name} {case.why}")
        took = time.monotonic() - began
        print(f"  {passes} passed, expected {suite.passes}; {took:.0f} s", flush=True)
        bad += [name] * (passes < suite.passes)
    if bad:
        raise SystemExit("fewer passed than expected: " + ", ".join(bad))


if __name__ == "__main__":
    main()
