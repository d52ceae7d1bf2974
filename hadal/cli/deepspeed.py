"""The commands and programs of DeepSpeed by name; `compat/deepspeed-stub` installs them."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, ClassVar

from hadal.cli.checkpoint import add_weights
from hadal.cli.main import command_line, main
from hadal.cli.parser import CONFIG_HELP, Parser, add_flag
from hadal.cli.run import choices_of, divided, parsed_words, pid_file, start
from hadal.cli.terminal import FAILED, fail, progress, show
from hadal.errors import HadalError, UsageError
from hadal.launcher.choices import planned_on

if TYPE_CHECKING:
    from hadal.checkpoint.storage import Location


# Switches of ds_report that choose among parts that `hadal report` does not have.
_REPORT_FLAGS = ("--hide_operator_status", "--hide_errors_and_warnings")


def run(args: Sequence[str] | None = None) -> int:
    """Run `deepspeed`: start a program, as `hadal run` does, with these words or the command's own.

    Programs written for it expect `--local_rank=N`. A program that calls this with words of its own
    gets a fault as an exception; the command prints it.
    """
    if args is not None:
        return start(["--local_rank", *args])
    return main(["run", "--local_rank", *sys.argv[1:]])


def launch() -> int:
    """`python -m deepspeed.launcher.launch`: one host's share, the others start theirs."""
    own, program = divided(sys.argv[1:], "--world_info", "--save_pid")
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", allow_abbrev=False)
    add_flag(parser, "--world_info WORLD_INFO", "base64 of JSON {host: [slots]}", required=True)
    add_flag(parser, "--node_rank NODE_RANK", "the number of this host", default="0")
    add_flag(parser, "--master_addr MASTER_ADDR", "address of rank 0's host", default="127.0.0.1")
    add_flag(parser, "--save_pid SAVE_PID", "the name of a file for this number", int)
    values, rest = parser.parse_known_args(own)
    slots = json.loads(base64.urlsafe_b64decode(values.world_info))
    include = "@".join(f"{host}:{','.join(map(str, ids))}" for host, ids in slots.items())
    with tempfile.TemporaryDirectory() as folder, pid_file(values.save_pid):
        hostfile = Path(folder, "hosts")
        hostfile.write_text(
            "".join(f"{host} slots={max(ids) + 1}\n" for host, ids in slots.items())
        )
        where = ["--hostfile", str(hostfile), "--include", include, "--no_ssh"]
        where += ["--node_rank", values.node_rank, "--master_addr", values.master_addr]
        return main(["run", "--local_rank", *where, *rest, *program])


def show_report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report inside a program, whose own arguments are not read."""
    parsed = command_line().parse_args(["report"])
    parsed.run(parsed)


def report() -> int:
    """Run `ds_report` (`dsr`): installed versions and available features."""
    return main(["report", *(word for word in sys.argv[1:] if word not in _REPORT_FLAGS)])


def ssh() -> int:
    """Run `ds_ssh`: a command on every host."""
    return main(["ssh", *sys.argv[1:]])


def elastic() -> int:
    """Run `ds_elastic -c CONFIG [-w RANKS]`: the batch, and who can train it."""
    parser = Parser(
        prog="ds_elastic",
        description="As `hadal elastic`: show which batch `elasticity` chooses, and how many ranks"
        " can train it.",
        examples=("ds_elastic -c ds_config.json -w 64",),
    )
    add_flag(parser, "-c --config CONFIG", CONFIG_HELP, required=True)
    add_flag(parser, "-w --world-size N", "Also show the batch of each of N ranks")
    parsed = parser.parse_args()
    ranks = [] if parsed.world_size in (None, "0") else ["--world-size", parsed.world_size]
    return main(["elastic", parsed.config, *ranks])


def io() -> int:
    """Run `ds_io` (`ds_nvme_tune`): how fast a disk is, and which `aio` section suits it."""
    parser = argparse.ArgumentParser(prog="ds_io")
    add_flag(parser, "--nvme_dir NVME_DIR", "a folder on the disk", required=True)
    parsed, rest = parser.parse_known_args()
    return main(["bench", "io", parsed.nvme_dir, *rest])


# ds_bench's flags for kinds of collectives, and their names here.
_KINDS = {
    "--all-reduce": "all_reduce",
    "--all-gather": "all_gather",
    "--reduce-scatter": "reduce_scatter",
    "--all-to-all": "all_to_all",
    "--broadcast": "broadcast",
    "--pt2pt": "pt2pt",
}


def bench() -> int:
    """Run `ds_bench`: how fast collectives are; with `--scan` at many sizes."""
    parser = Parser(
        prog="ds_bench",
        description="As `hadal bench comm`: measure collectives between ranks.",
        examples=("ds_bench --all-reduce --scan",),
    )
    kinds = parser.add_argument_group("Collectives (default: all)")
    for flag, kind in _KINDS.items():
        kinds.add_argument(
            flag, action="append_const", const=kind, dest="kinds", help=f"Measure {kind}"
        )
    add_flag(parser, "--scan", "Measure many sizes")
    add_flag(parser, "--trials N", "Calls", default="50")
    add_flag(parser, "--warmups N", "Calls before them", default="5")
    add_flag(parser, "--maxsize N", "With --scan: up to 2^N elements", default="24")
    add_flag(parser, "--async-op", "Start each call, then wait for it")
    add_flag(
        parser, "--bw_unit", "Bits or bytes per second", default="Gbps", choices=("Gbps", "GBps")
    )
    add_flag(parser, "--backend NAME", "torch's backend (default: the device's own)", default="")
    add_flag(parser, "--dist", "Whose calls", default="deepspeed", choices=("deepspeed", "torch"))
    add_flag(parser, "--raw", "Print plain numbers")
    add_flag(parser, "--dtype DTYPE", "The elements' dtype", default="torch.float")
    add_flag(
        parser, "--mem_factor SHARE", "Without --scan: share of the free memory", default="0.1"
    )
    add_flag(parser, "--debug", "Accepted; changes nothing")
    add_flag(parser, "--local_rank N", "Accepted; changes nothing")
    given = parser.parse_args()
    words = [*(given.kinds or ("--all",)), "--trials", given.trials, "--warmups", given.warmups]
    words += ["--bw_unit", given.bw_unit, "--dtype", given.dtype]
    words += ["--dist", "torch" if given.dist == "torch" else "hadal"]
    words += (
        ["--minsize", "0", "--factor", "2", "--maxsize", given.maxsize]
        if given.scan
        else ["--mem_factor", given.mem_factor]
    )
    words += ["--backend", given.backend] if given.backend else []
    words += [
        flag for flag, is_on in (("--async_op", given.async_op), ("--raw", given.raw)) if is_on
    ]
    return main(["bench", "comm", *words])


def ds_to_universal(arguments: Sequence[str] | None = None) -> int:
    """Convert a checkpoint of Hadal or DeepSpeed; return the exit code."""
    parsed = _universal_parser().parse_args(arguments)
    try:
        written = to_universal(parsed)
    except HadalError as error:
        fail(str(error))
        return FAILED
    show(str(written))
    return 0


def universal_arguments() -> argparse.Namespace:
    """Return the flags of the program that runs."""
    return _universal_parser().parse_args()


def _universal_parser() -> Parser:
    made = Parser(
        description="Convert a checkpoint of Hadal or DeepSpeed to DeepSpeed's universal format,"
        " which loads at any stage and number of ranks.",
        examples=(
            "python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step3"
            " --output_folder run/global_step3_universal",
        ),
    )
    add_flag(made, "--input_folder DIR", "One checkpoint", required=True)
    add_flag(made, "--output_folder OUT", "The directory to write to", required=True)
    add_flag(
        made,
        "--no_strict",
        "Accept patterns in universal_checkpoint_info that match no parameter",
        dest="strict",
        action="store_false",
    )
    unused = made.add_argument_group("Accepted and not needed")
    for flag in ("--num_extract_workers", "--num_merge_workers"):
        unused.add_argument(flag, type=int, metavar="N", help="One process reads and writes")
    for flag in ("--keep_temp_folder", "--inject_missing_state"):
        unused.add_argument(flag, action="store_true", help="Nothing is missing or left over")
    return made


def to_universal(parsed: argparse.Namespace) -> Location:
    """Convert as the flags say; return the folder.

    Raises:
        HadalError: the checkpoint cannot be converted.
    """
    from hadal.checkpoint.files import location_of
    from hadal.checkpoint.formats.universal import export_universal, nbytes_of_universal
    from hadal.checkpoint.opening import opened

    source = opened(parsed.input_folder)
    with progress(nbytes_of_universal(source), "converting", is_bytes=True) as advance:
        written = export_universal(
            source,
            location_of(parsed.output_folder),
            strict=getattr(parsed, "strict", True),
            progress=advance,
        )
    source.close()
    return written


_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), "F32"),
    **dict.fromkeys(("fp16", "float16", "half"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
}


def zero_to_fp32(arguments: Sequence[str] | None = None) -> int:
    """Write the fp32 weights of a checkpoint; return the exit code."""
    return _write_weights(_weights_parser("fp32 weights").parse_args(arguments), "F32")


def zero_to_torch(arguments: Sequence[str] | None = None) -> int:
    """Write the weights of a checkpoint in the dtype that is named; return the exit code."""
    parser = _weights_parser("weights", " --dtype bf16")
    add_flag(parser, "--dtype", "dtype of the weights", required=True, choices=sorted(_DTYPES))
    parsed = parser.parse_args(arguments)
    return _write_weights(parsed, _DTYPES[parsed.dtype])


def _weights_parser(what: str, more: str = "") -> Parser:
    parser = Parser(
        description=f"Write the {what} of a checkpoint in Hugging Face layout.",
        examples=(f"python {Path(sys.argv[0]).name} . exported{more}",),
    )
    add_flag(parser, "checkpoint_dir DIR", "The directory or URL given to save_checkpoint")
    add_flag(parser, "output_dir OUT", "The directory or URL to write to")
    add_flag(parser, "--safe_serialization", "Write safetensors files instead of torch.save's")
    add_flag(parser, "-t --tag TAG", "Which checkpoint (default: the latest)")
    add_weights(parser)
    add_flag(parser, "-d --debug", "Show the log, too")
    return parser


def _write_weights(parsed: argparse.Namespace, dtype: str) -> int:
    if parsed.debug:
        logging.basicConfig(level=logging.DEBUG)

    from hadal.checkpoint.export import convert_zero_checkpoint_to_state_dict
    from hadal.checkpoint.shards import DTYPE_OF

    try:
        convert_zero_checkpoint_to_state_dict(
            parsed.checkpoint_dir,
            parsed.output_dir,
            DTYPE_OF[dtype],
            max_shard_size=parsed.max_shard_size,
            safe_serialization=parsed.safe_serialization,
            tag=parsed.tag,
            exclude_frozen_parameters=parsed.exclude_frozen_parameters,
            part=parsed.part,
        )
    except (HadalError, ValueError) as error:
        fail(str(error))
        return FAILED
    return 0


# ---- runners -------------------------------------------------------------------------------------


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line of `deepspeed`: by default this process's own."""
    parsed = parsed_words(["--local_rank", *(sys.argv[1:] if args is None else args)])
    parsed.user_script, *parsed.user_args = parsed.program or [""]
    return parsed


class MultiNodeRunner:
    """The command with which one launcher starts a program on all hosts.

    Args:
        args: the result of `parse_args`; its program, and what else it says of the job.
        world_info_base64: not needed: `get_cmd` gets the hosts.
        resource_pool: the same.
    """

    name: ClassVar[str] = ""
    program: ClassVar[str] = "mpirun"

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Any = None
    ) -> None:
        self.args, self.world_info_base64 = args, world_info_base64
        self.resource_pool = resource_pool
        self.user_script, self.user_arguments = args.user_script, args.user_args
        self.exports: dict[str, str] = {}

    def add_export(self, key: str, var: str) -> None:
        """Set a variable for every rank."""
        self.exports[key.strip()] = var.strip()

    def backend_exists(self) -> bool:
        """Return whether the launcher is installed here."""
        return which(self.program) is not None

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]
    ) -> Any:
        """Return the words of the command, whose own variables go into `environment`.

        `active_resources` are each host's slots, or their number.

        Raises:
            LaunchError: the arguments contradict each other, or hosts differ and may not.
            UsageError: this is the base of all runners.
        """
        if not self.name:
            raise UsageError(f"{type(self).__name__} has no launcher; use PDSHRunner or its like")
        parsed = argparse.Namespace(**vars(self.args))
        parsed.program = [self.user_script, *self.user_arguments]
        slots = {
            host: tuple(range(own) if isinstance(own, int) else own)
            for host, own in active_resources.items()
        }
        choices = replace(choices_of(parsed), launcher=self.name)
        plan = planned_on(slots, choices, environment, self.exports, Path.cwd())
        (command,) = plan.start_commands.values()
        environment.update(command.variables)
        return list(command.words)


def _runner(title: str, launcher: str, program: str) -> type[MultiNodeRunner]:
    words = {"name": launcher, "program": program, "__module__": __name__}
    return type(title, (MultiNodeRunner,), words)


IMPIRunner = _runner("IMPIRunner", "impi", "mpirun")
MPICHRunner = _runner("MPICHRunner", "mpich", "mpirun")
MVAPICHRunner = _runner("MVAPICHRunner", "mvapich", "mpirun")
OpenMPIRunner = _runner("OpenMPIRunner", "openmpi", "mpirun")
SlurmRunner = _runner("SlurmRunner", "slurm", "srun")


class PDSHRunner(MultiNodeRunner):
    """The command with which pdsh starts a program, and the one that ends it."""

    name, program = "pdsh", "pdsh"

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]
    ) -> Any:
        """Return the words of both commands, and the environment."""
        words = super().get_cmd(environment, active_resources)
        job = words[-1].partition(" --job ")[2].partition(" ")[0]
        return words, [*words[:-1], f"pkill -f {job}"], environment
