"""From flags to a job: every flag of the `deepspeed` command takes effect or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hadal.cli.main import command_line, main
from hadal.cli.run import divided
from hadal.errors import LaunchError
from hadal.launcher import choices as choosing
from hadal.launcher.choices import Choices, LaunchPlan, planned
from hadal.launcher.job import Elastic, ProgramKind

HOSTS = "a slots=4\nb slots=4\nc slots=2\n"


@pytest.fixture(autouse=True)
def _without_accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choosing, "devices_here", lambda: 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    def make(variables: dict[str, str] | None = None, **fields: Any) -> LaunchPlan:
        return planned(Choices(("train.py",), **fields), variables or {}, tmp_path)

    return make


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text(HOSTS)
    return "hosts"


# ---- this machine ----------------------------------------------------------------------------


def test_on_cpus_one_process_is_started_with_a_note(plan: Any) -> None:
    made = plan()
    assert made.job.pool == {"localhost": (0,)}
    assert "--num_accelerators" in made.notes[0]
    assert not plan(num_slots=3).notes
    assert plan(num_slots=3).job.pool == {"localhost": (0, 1, 2)}


def test_every_accelerator_is_used(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "devices_here", lambda: 4)
    made = plan()
    assert made.job.pool == {"localhost": (0, 1, 2, 3)}
    assert not made.job.shows_slots
    assert plan(exclude="localhost:1").job.pool == {"localhost": (0, 2, 3)}
    assert plan(exclude="localhost:1").job.shows_slots


def test_the_visible_devices_are_the_slots(plan: Any) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": "2,5"}
    assert plan(shown).job.pool == {"localhost": (2, 5)}
    assert plan(shown, num_slots=1).job.pool == {"localhost": (2,)}
    made = plan(shown, include="localhost:0")
    assert made.job.pool == {"localhost": (0,)}
    assert "override" in made.notes[0]
    # Names of devices stay as they are.
    named = plan({"CUDA_VISIBLE_DEVICES": "GPU-8f,MIG-2a"}).job
    assert (named.pool, named.shows_slots) == ({"localhost": (0, 1)}, False)


def test_slots_of_this_machine_are_named_by_any_of_its_names(plan: Any) -> None:
    assert plan(include="localhost:1,3").job.pool == {"localhost": (1, 3)}
    assert plan(include="127.0.0.1:0").job.pool == {"localhost": (0,)}
    with pytest.raises(LaunchError, match="names 'worker-9', but there is no hostfile"):
        plan(include="worker-9:0")


def test_a_port_is_the_agents_or_the_requested_one(plan: Any, hostfile: str) -> None:
    assert plan(master_port=1234).job.port == 1234
    assert plan().job.port == 0
    assert plan().address == "127.0.0.1"
    assert plan(hostfile=hostfile).job.port == 29500


# ---- hosts -----------------------------------------------------------------------------------


def test_a_hostfile_lists_the_hosts(plan: Any, hostfile: str) -> None:
    made = plan(hostfile=hostfile, num_nodes=2, num_slots=1)
    assert made.job.pool == {"a": (0,), "b": (0,)}
    assert made.address == ""
    assert [start_command.is_ssh for start_command in made.start_commands.values()] == [True, True]
    assert plan(hostfile=hostfile, exclude="a@b:0,1").job.pool == {"b": (2, 3), "c": (0, 1)}


def test_the_named_host_is_used(plan: Any, hostfile: str) -> None:
    (start_command,) = plan(hostfile=hostfile, include="b:1").start_commands.values()
    assert start_command.is_ssh


def test_one_host_that_is_this_one_needs_no_ssh(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    (start_command,) = plan(hostfile="hosts").start_commands.values()
    assert not start_command.is_ssh
    (forced,) = plan(hostfile="hosts", force_multi=True).start_commands.values()
    assert forced.is_ssh


def test_a_missing_hostfile_is_refused(plan: Any) -> None:
    """Otherwise a typing error would turn a job of many hosts into one of this machine."""
    with pytest.raises(LaunchError, match=r"--hostfile .*/no-such: there is no such file"):
        plan(hostfile="no-such")
    with pytest.raises(LaunchError, match="--num_nodes 2, but there is no hostfile"):
        plan(num_nodes=2)


def test_ssh_gets_its_port_and_arguments(plan: Any, hostfile: str) -> None:
    fields = {"ssh_port": 2222, "launcher_args": ("-i", "/my key"), "venv_script": "/v/bin/a b"}
    words = plan(hostfile=hostfile, **fields).start_commands["b"].words
    assert words[0] == "ssh"
    assert words[-2] == "b"
    assert words[words.index("-p") + 1] == "2222"
    assert "/my key" in words
    assert words[-1].startswith(". '/v/bin/a b' && cd / && PYTHONPATH=")
    assert words[-1].endswith("exec python -u -m hadal.launcher.node")


def test_without_ssh_each_host_starts_its_own_share(plan: Any, hostfile: str) -> None:
    here = {"hostfile": hostfile, "no_ssh": True, "master_addr": "10.0.0.1"}
    made = plan(**here, node_rank=1)
    assert {host: start_command.is_ssh for host, start_command in made.start_commands.items()} == {
        "b": False
    }
    assert made.address == "10.0.0.1"
    for fields, told in (
        ({**here}, "set its index in the hostfile"),
        ({**here, "node_rank": 3}, "hosts 0 to 2"),
        ({**here, "node_rank": 1, "master_addr": ""}, "with --master_addr"),
        ({"node_rank": 1}, "for --no_ssh"),
    ):
        with pytest.raises(LaunchError, match=told):
            plan(**fields)


def test_other_hosts_get_variables_by_prefix_and_file(
    plan: Any, hostfile: str, tmp_path: Path
) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nMINE=1\n")
    there = {"NCCL_DEBUG": "INFO", "NCCL_X": "2", "HOME": "/h", "PYTHONPATH": "/lib"}
    told = {"NCCL_DEBUG": "WARN", "MINE": "1", "NCCL_X": "2", "PYTHONPATH": f"{tmp_path}:/lib"}
    assert plan(there, hostfile=hostfile).job.variables == told
    assert plan(there).job.variables == {"NCCL_DEBUG": "WARN", "MINE": "1"}
    (tmp_path / "other").write_text("MINE=2\n")
    assert plan({"DS_ENV_FILE": "other"}).job.variables == {"MINE": "2"}


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"include": "a", "exclude": "b"}, "contradict"),
        ({"include": "a", "num_slots": 2}, "leave out --num_nodes"),
        ({"exclude": "a", "num_nodes": 2}, "leave out --num_nodes"),
        ({"no_python": True, "module": True}, "contradict"),
        ({"no_python": True, "as_deepspeed": True}, "needs Python"),
        ({"bind_core_list": "0-x"}, "--bind_core_list"),
        ({"num_nodes": 4}, "there are 3 hosts: a, b, c"),
    ],
)
def test_contradictions_are_refused(
    plan: Any, hostfile: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(LaunchError, match=told):
        plan(hostfile=hostfile, **fields)


def test_an_elastic_job_has_bounds(plan: Any, hostfile: str) -> None:
    job = plan(hostfile=hostfile, elastic_training=True).job
    assert (job.elastic, job.port) == (Elastic(1, 3, 3, 600.0), 0)
    told = {"min_elastic_nodes": 2, "max_elastic_nodes": 9, "max_restarts": 0, "master_port": 7}
    job = plan({"HADAL_JOIN_S": "9"}, hostfile=hostfile, elastic_training=True, **told).job
    assert (job.elastic, job.port) == (Elastic(2, 9, 0, 9.0), 7)
    idle = plan(hostfile=hostfile, min_elastic_nodes=2, max_restarts=0).notes
    assert idle == ("--min_elastic_nodes, --max_restarts: no effect here",)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"launcher": "slurm", "num_slots": 1}, "which --launcher slurm cannot do"),
        ({"no_ssh": True, "node_rank": 0}, "leave out --no_ssh, or start each host by `torchrun"),
        ({"min_elastic_nodes": 3, "max_elastic_nodes": 2}, "3 is more than --max_elastic_nodes 2"),
        ({"min_elastic_nodes": 4}, "--min_elastic_nodes 4, but there are 3 hosts: a, b, c"),
    ],
)
def test_jobs_that_cannot_be_elastic_are_refused(
    plan: Any, hostfile: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(LaunchError, match=told):
        plan(hostfile=hostfile, elastic_training=True, **fields)


def test_flags_without_effect_are_reported(plan: Any, hostfile: str) -> None:
    fields = {"ssh_port": 22, "venv_script": "v", "launcher_args": ("-x",), "no_ssh_check": True}
    flags = "--launcher_args, --ssh_port, --venv_script, --no_ssh_check: no effect here"
    assert plan(**fields, num_slots=1).notes == (flags,)
    assert plan(**fields, hostfile=hostfile).notes == ()
    pdsh = plan(**fields, hostfile=hostfile, launcher="pdsh").notes
    assert pdsh == ("--ssh_port, --no_ssh_check: no effect here",)
    assert plan(num_slots=1, launcher="pdsh").notes == ("--launcher: no effect here",)
    slurm = plan(num_slots=1, launcher="slurm", ssh_port=22, local_rank=True).notes
    assert slurm == ("--ssh_port: no effect with Slurm",)


def test_a_grace_that_is_not_a_number_is_refused(plan: Any) -> None:
    assert plan({"HADAL_GRACE_S": "2.5"}).job.program.grace_s == 2.5
    with pytest.raises(LaunchError, match="HADAL_GRACE_S"):
        plan({"HADAL_GRACE_S": "soon"})


def test_the_programs_fields(plan: Any, tmp_path: Path) -> None:
    made = plan(module=True, bind_core_list="0-1", enable_each_rank_log="logs", local_rank=True)
    program = made.job.program
    assert (program.kind, program.binds, program.cores) == (ProgramKind.MODULE, True, (0, 1))
    assert (program.logs, program.passes_local_rank) == (str(tmp_path / "logs"), True)
    assert plan(no_python=True).job.program.kind is ProgramKind.BARE


# ---- the command line ------------------------------------------------------------------------

OWN = [
    *("-H", "hosts", "-i", "a", "-e", "b", "--num_nodes=2", "--num_gpus", "3"),
    *("--num_accelerators", "3", "--master_addr", "x", "--master_port", "1", "--node_rank", "0"),
    *("--launcher", "SSH", "--launcher_args", "-x -y", "--module", "--no_python"),
    *("--no_local_rank", "--no_ssh", "--no_ssh_check", "--ssh_port", "22", "--save_pid"),
    *("--enable_each_rank_log", "logs", "--elastic_training", "--min_elastic_nodes", "1"),
    *("--max_elastic_nodes", "2", "--max_restarts", "0", "--force_multi"),
    *("--bind_cores_to_rank", "--bind_core_list"),
    *("0-3", "--venv_script", "v", "--as-deepspeed", "--log_level", "info"),
    "-q",
]


@pytest.mark.parametrize("theirs", [["train.py", "--num_gpus", "8", "--", "-q"], ["a b"], []])
@pytest.mark.parametrize("own", [OWN, OWN[:-1], ["--hostfile", "-x"], ["--autotuning", "run"], []])
def test_words_after_the_program_are_its_arguments(own: list[str], theirs: list[str]) -> None:
    assert divided([*own, *theirs]) == (own, theirs)
    assert divided([*own, "--", *theirs]) == (own, theirs)


def test_every_flag_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Choices] = []

    def note(choices: Choices, *_: Any) -> LaunchPlan:
        seen.append(choices)
        raise LaunchError("seen")

    monkeypatch.setattr(choosing, "planned", note)
    assert main(["run", *OWN, "train.py", "--x"]) == 2
    assert capsys.readouterr().err == "error: seen\n"
    assert seen == [
        Choices(
            words=("train.py", "--x"),
            hostfile="hosts",
            include="a",
            exclude="b",
            num_nodes=2,
            num_slots=3,
            master_addr="x",
            master_port=1,
            node_rank=0,
            launcher="ssh",
            launcher_args=("-x", "-y"),
            module=True,
            no_python=True,
            local_rank=False,
            no_ssh=True,
            no_ssh_check=True,
            ssh_port=22,
            enable_each_rank_log="logs",
            force_multi=True,
            bind_cores_to_rank=True,
            bind_core_list="0-3",
            venv_script="v",
            elastic_training=True,
            min_elastic_nodes=1,
            max_elastic_nodes=2,
            max_restarts=0,
            as_deepspeed=True,
        )
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no program"),
        (["--launcher_args", "'", "t.py"], """--launcher_args "'" cannot be read: No closing"""),
        (["--num_nodes", "1:2", "t.py"], "--num_nodes 1:2: a range needs --elastic_training"),
        (
            ["--num_nodes", "1:2", "--elastic_training", "--max_elastic_nodes", "3", "t.py"],
            "give only one of them",
        ),
        (["-H", "/", "t.py"], "/ is a folder; expected a file"),
    ],
)
def test_faulty_words_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_minus_one_leaves_a_number_open(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Choices] = []

    def note(choices: Choices, *_: Any) -> LaunchPlan:
        seen.append(choices)
        raise LaunchError("seen")

    monkeypatch.setattr(choosing, "planned", note)
    words = ["--num_gpus", "-1", "--num_nodes=-1", "--node_rank", "-1"]
    assert main(["run", *words, "train.py"]) == 2
    assert seen == [Choices(("train.py",))]


def test_a_binary_hostfile_is_refused(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x8d")
    with pytest.raises(LaunchError, match="hosts is not UTF-8 text"):
        plan(hostfile="hosts")
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbflocalhost slots=2\r\n")  # a Windows editor's
    assert plan(hostfile="hosts").job.pool == {"localhost": (0, 1)}


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_is_a_port(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--master_port", port, "t.py"])
    assert "--master_port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num_gpsu", "2"], "unknown flag --num_gpsu\nhint: did you mean --num_gpus?"),
        (["--launcher", "rsh"], "--launcher: expected ssh, pdsh, "),
        (["--log_level", "loud"], "--log_level: expected trace, "),
    ],
)
def test_unknown_flags_and_words_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", *words, "t.py"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert "Usage: hadal run [OPTIONS] SCRIPT" in error


def test_as_deepspeed_adds_the_local_rank(plan: Any) -> None:
    def tells(**fields: Any) -> bool:
        told: bool = plan(num_slots=1, **fields).job.program.passes_local_rank
        return told

    assert [tells(), tells(as_deepspeed=True)] == [False, True]
    assert tells(local_rank=True) and not tells(as_deepspeed=True, local_rank=False)


@pytest.mark.parametrize(
    ("words", "is_given"),
    [
        ([], None),
        (["--local_rank"], True),
        (["--local-rank", "--no_local_rank"], False),
        (["--no-local-rank"], False),
    ],
)
def test_the_last_flag_of_the_local_rank_wins(words: list[str], is_given: bool | None) -> None:
    own, program = divided([*words, "train.py", "--local_rank=3"])
    assert program == ["train.py", "--local_rank=3"]
    assert command_line().parse_args(["run", *own]).local_rank is is_given
