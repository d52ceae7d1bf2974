"""`hadal ssh COMMAND ...`: the same command on every host of a hostfile."""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hadal.cli.parser import add_command, add_flag, port
from hadal.errors import LaunchError


def add_to(group: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        group,
        "ssh",
        help="Run a command on every host of a hostfile",
        description="Run a command on every host of a hostfile at once. Each line of output begins"
        " with its host; the exit code is the highest of all hosts.",
        examples=("hadal ssh -f hosts nvidia-smi -L",),
        words="COMMAND ...",
    )
    add_flag(parser, "-f -H --hostfile FILE", "Lines `NAME slots=N`", Path, Path("/job/hostfile"))
    add_flag(parser, "-i --include HOSTS", "Use only these: NAME[@NAME...]", default="")
    add_flag(parser, "-e --exclude HOSTS", "Use all except these", default="")
    add_flag(parser, "--ssh_port PORT", "Port of sshd on the hosts", port)
    add_flag(parser, "--ssh_args WORDS", "More arguments for ssh, in quotes", default="")
    add_flag(parser, "words COMMAND ...", "To be run", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command everywhere; return the worst exit code."""
    from hadal.launcher.choices import hostfile_at
    from hadal.launcher.hosts import filtered

    words = parsed.words
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):  # argparse takes a flag that it does not know along
        parsed.parser.refuse(words[0])
    if not words:
        raise LaunchError("no command: expected hadal ssh [-f HOSTFILE] COMMAND ...")
    hosts = list(filtered(hostfile_at(parsed.hostfile), parsed.include, parsed.exclude))
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return max(pool.map(lambda host: _run(host, words, parsed), hosts))


def _run(host: str, words: list[str], parsed: argparse.Namespace) -> int:
    from hadal.launcher.start_commands import ssh_to

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
