"""Simulated hosts on this machine: network namespaces on a bridge, each with a real sshd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_NETWORK = "10.213"
_UP_S = 60


def why_not() -> str:
    """Return why such hosts are impossible here; empty if they are possible."""
    if SSHD is None:
        return "no sshd is installed (Debian: openssh-server)"
    for program in ("ssh", "ssh-keygen", "ip"):
        if shutil.which(program) is None:
            return f"no {program} is installed (Debian: openssh-client, iproute2)"
    if os.geteuid() != 0:
        return "network namespaces and sshd need root"
    name = f"hadal{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return tried.stderr.strip()


class Hosts:
    """Simulated hosts by name, reached through one ssh configuration."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self.folder = folder
        self._bridge = f"hd{os.getpid() % 10**6}"
        self._network = f"{_NETWORK}.{os.getpid() % 250}"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}
        self.config = folder / "ssh_config"

    def up(self) -> None:
        """Create the bridge, the namespaces and their sshds."""
        Path("/run/sshd").mkdir(exist_ok=True)
        _ip(f"link add {self._bridge} type bridge")
        _ip(f"addr add {self._network}.254/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        _keygen(self.folder / "key")
        _keygen(self.folder / "host_key")
        shutil.copy(self.folder / "key.pub", self.folder / "authorized")
        lines = [f"IdentityFile {self.folder}/key", "StrictHostKeyChecking no", "LogLevel ERROR"]
        lines += ["User root", "UserKnownHostsFile /dev/null"]
        for name in self.names:
            lines += [f"Host {name}", f"  HostName {self.address(name)}"]
            self._add(name)
        self.config.write_text("\n".join(lines) + "\n")
        for name in self.names:
            self._wait_for(name)

    def down(self) -> None:
        """Remove all of it, with every process left in it."""
        for name in self.names:
            namespace = self._namespace(name)
            told = subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True
            ).stdout
            for pid in told.split():
                os.kill(int(pid), signal.SIGKILL)
            if name in self._sshds:
                self._sshds[name].wait()
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
            subprocess.run(["ip", "link", "del", self._link(name)], capture_output=True)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def address(self, name: str) -> str:
        return f"{self._network}.{self.names.index(name) + 1}"

    def inside(self, name: str) -> list[str]:
        """Return the words that start a command on a host."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def cut_off(self, name: str) -> None:
        """Cut the host off the network in both directions."""
        _ip(f"link set {self._link(name)} down")

    def join_again(self, name: str) -> None:
        _ip(f"link set {self._link(name)} up")

    def stop_sshd(self, name: str) -> None:
        """Stop the host's sshd, so that it refuses new connections."""
        self._sshds[name].terminate()
        self._sshds[name].wait()

    def start_sshd(self, name: str) -> None:
        """Start the host's sshd, and return once it takes connections."""
        self._start_sshd(name)
        self._wait_for(name)

    def _start_sshd(self, name: str) -> None:
        assert SSHD is not None
        options = [
            f"HostKey={self.folder}/host_key",
            f"AuthorizedKeysFile={self.folder}/authorized",
            *("UsePAM=no", "StrictModes=no", "PidFile=none", "PermitRootLogin=yes", "UseDNS=no"),
        ]
        self._sshds[name] = subprocess.Popen(
            [
                *self.inside(name),
                SSHD,
                "-D",
                "-f",
                "/dev/null",
                *(f"-o{option}" for option in options),
            ],
            stderr=subprocess.DEVNULL,
        )

    def _add(self, name: str) -> None:
        namespace, link = self._namespace(name), self._link(name)
        _ip(f"netns add {namespace}")
        _ip(f"link add {link} type veth peer name eth0 netns {namespace}")
        _ip(f"link set {link} master {self._bridge} up")
        _ip(f"-n {namespace} addr add {self.address(name)}/24 dev eth0")
        _ip(f"-n {namespace} link set eth0 up")
        _ip(f"-n {namespace} link set lo up")
        own = Path("/etc/netns", namespace)  # what `ip netns exec` puts in the place of /etc's
        own.mkdir(parents=True)
        told = [f"{self.address(each)} {each}" for each in self.names]
        (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *told]) + "\n")
        (own / "resolv.conf").write_text("")
        self._start_sshd(name)

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + _UP_S
        command = ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", name, "true"]
        while subprocess.run(command, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"{' '.join(command)} fails"
            time.sleep(0.1)

    def _namespace(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def _link(self, name: str) -> str:
        return f"{self._bridge}v{self.names.index(name)}"


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


def _keygen(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
