"""`hadal ssh COMMAND ...`: the same command on every host of a hostfile."""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hadal.errors import LaunchError

_FAULTY = 2


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("ssh", help="run a command on every host of a hostfile")
    parser.add_argument(
        "-f",
        "-H",
        "--hostfile",
        type=Path,
        default=Path("/job/hostfile"),
        help="lines `NAME slots=N` (default: %(default)s)",
    )
    parser.add_argument("-i", "--include", default="", help="these hosts alone: NAME[@NAME...]")
    parser.add_argument("-e", "--exclude", default="", help="all hosts but these")
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument("--ssh_args", default="", help="more words for ssh, in quotes")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command everywhere; return the worst exit code."""
    from hadal.launcher.hosts import filtered, read_hostfile
    from hadal.launcher.variables import text_of

    words = parsed.words[1:] if parsed.words[:1] == ["--"] else parsed.words
    try:
        if not words:
            raise LaunchError("no command: expected hadal ssh [-f HOSTFILE] COMMAND ...")
        told = read_hostfile(text_of(parsed.hostfile), str(parsed.hostfile))
        hosts = list(filtered(told, parsed.include, parsed.exclude))
    except (LaunchError, OSError) as error:
        print(f"hadal ssh: {error}", file=sys.stderr)
        return _FAULTY
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return max(pool.map(lambda host: _run(host, words, parsed), hosts))


def _run(host: str, words: list[str], parsed: argparse.Namespace) -> int:
    from hadal.launcher.ways import ssh_to

    command = ssh_to(host, port=parsed.ssh_port, arguments=parsed.ssh_args.split())
    done = subprocess.run(
        [*command, " ".join(words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    sys.stdout.write("".join(f"{host}: {line}\n" for line in done.stdout.splitlines()))
    if done.returncode:
        # In one piece, as other hosts' lines come meanwhile.
        sys.stderr.write(f"{host}: exit code {done.returncode}\n")
    return done.returncode
