"""Several hosts on this machine, joined by links of a given rate: runs one command on each, all at once.

    python benchmarks/hosts.py --rate 1gbit --ranks 1 -- -m ds_zipccl.cli.main bench collectives    # by torchrun on each host
    python benchmarks/hosts.py --hosts 3 -- hostname -I                                                   # any other command

A host has a network, a name, processes and a /dev/shm of its own (Linux namespaces), so whoever asks whether ranks share a host is told
the truth. Processors and files it shares with the others. Each host is joined to one switch, with the rate both ways (a token bucket that
lets 72 KiB pass at once, from 600 Mbit on what the link carries in 1 ms). Nothing is added to the latency. Needs root, and the commands in
COMMANDS. The hosts end with this process, however it ends, and leave nothing: namespaces without a process are gone.
"""
import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

COMMANDS = "ip", "tc", "unshare", "setpriv", "mount", "hostname", "sh"         # packages iproute2, util-linux, mount, hostname, dash
PORT = 29500                        # free: nobody else is in a host's network
GRACE_S = 30                        # the others' time to find out by themselves that a host's command has failed
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SHAPE = "tc qdisc add dev {device} root tbf rate {rate} burst {burst} limit {limit}"
#: What hosts are made of, apart from how they are made.
_PROBE = """set -e
hostname probe
mount -t tmpfs none /dev/shm
ip link add probe type bridge
ip link add one type veth peer name other
tc qdisc add dev one root tbf rate 1gbit burst 128kb limit 1mb
"""
_HOST = """set -e
hostname {name}
mount --bind {hosts_file} /etc/hosts
mount -t tmpfs none /dev/shm
echo made >&0
read _
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
{shape}
exec "$@" </dev/null
"""
_SWITCH = """set -e
ip link add switch type bridge
ip link set switch up
{ports}
echo made >&0
read _
"""
_PORT = """ip link add port{host} type veth peer name eth0 netns {pid}
ip link set port{host} master switch up
{shape}
"""


class HostsError(Exception):
    """Hosts cannot be made here; the text says why."""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def bits_per_second(rate: str) -> int:
    """Of "100mbit", "2.5gbit". Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found or not float(found[1]):
        raise ValueError(f"rate {rate}: expected a number and one of {', '.join(_UNITS)}, such as 100mbit")
    return round(float(found[1]) * _UNITS[found[2]])


def why_not() -> str | None:
    """Why hosts cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "hosts need root: they are made of namespaces"
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"hosts need the command {', '.join(missing)} (Debian, Ubuntu: apt-get install iproute2)"
    done = subprocess.run([*"unshare --net --mount --uts --pid --mount-proc --fork sh -c".split(), _PROBE], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    if done.returncode:
        return f"this system lets nobody make hosts (containers: they need --privileged): {done.stderr.strip() or done.returncode}"
    return None


def torchrun(num_hosts: int, ranks: int, arguments: Sequence[str]) -> list[list[str]]:
    """A command for each host: ``python ARGUMENTS`` in ``ranks`` processes of each, host 0 has the rendezvous."""
    return [[sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_hosts), "--node_rank", str(host), "--nproc_per_node",
             str(ranks), "--master_addr", address(0), "--master_port", str(PORT), *arguments] for host in range(num_hosts)]


def run(commands: Sequence[Sequence[str]], rate: str | None = None, *, seconds: float | None = None, logs: Path | None = None,
        environment: dict[str, str] | None = None) -> list[int]:
    """Runs ``commands[i]`` on host i (its name: "host" and i), all at once; their exit statuses, 137 of one that was ended.

    ``rate``: of each host's link, one way and the other, as tc spells it (None: as fast as it goes). ``seconds``: for all; a host that
    runs on then, or GRACE_S longer than one that has failed, is ended. ``logs``: a folder, where host i's output goes to host{i}.log.
    Raises HostsError where hosts cannot be made.
    """
    shape = [_shape(device, rate) for device in ["eth0", *(f"port{host}" for host in range(len(commands)))]]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hosts_file = Path(folder, "hosts")
        hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{address(i)} host{i}\n" for i in range(len(commands))))
        hosts = []
        for i, command in enumerate(commands):
            output = stack.enter_context(open(logs / f"host{i}.log", "wb")) if logs else None
            hosts.append(_Namespaces(stack, "--net --mount --uts --pid --mount-proc", _HOST, list(command), output, environment,
                                     name=f"host{i}", address=address(i), hosts_file=shlex.quote(str(hosts_file)), shape=shape[0]))
        for host in hosts:
            host.await_made()
        ports = "".join(_PORT.format(host=i, pid=host.process.pid, shape=shape[1 + i]) for i, host in enumerate(hosts))
        _Namespaces(stack, "--net", _SWITCH, [], None, None, ports=ports).await_made()
        for host in hosts:
            host.go_on()
        return _statuses([host.process for host in hosts], seconds)


def _shape(device: str, rate: str | None) -> str:
    if rate is None:
        return ""
    a_second = bits_per_second(rate) // 8
    burst = max(72 << 10, a_second // 1000)             # the kernel hands 64 KiB over at once, and cuts what is more than the burst
    return _SHAPE.format(device=device, rate=rate, burst=burst, limit=burst + a_second // 10)


class _Namespaces:
    """A shell in namespaces of its own, which ends when this process does or ``stack`` is left."""

    def __init__(self, stack: ExitStack, kinds: str, script: str, command: list[str], output, environment: dict[str, str] | None, **names):
        self._line, its_end = socket.socketpair()       # its standard input, and what it writes "made" to
        words = [*f"setpriv --pdeathsig KILL unshare {kinds} --fork --kill-child sh -c".split(), script.format(**names), "sh", *command]
        with its_end:
            self.process = subprocess.Popen(words, stdin=its_end, stdout=output, stderr=output and subprocess.STDOUT,
                                            env=os.environ | (environment or {}))
        stack.callback(self._end)

    def _end(self) -> None:
        self.process.kill()                             # what is in there dies with it
        self.process.wait()
        self._line.close()

    def await_made(self) -> None:
        if self._line.recv(4) != b"made":
            raise HostsError(f"a host could not be made: status {self.process.wait()}; the first line of its output says why")

    def go_on(self) -> None:
        self._line.sendall(b"\n")


def _statuses(processes: list[subprocess.Popen], seconds: float | None) -> list[int]:
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    while None in (statuses := [process.poll() for process in processes]) and time.monotonic() < end:
        if any(statuses):
            end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    return [137 if status is None else status for status in statuses]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of each host's link: 100mbit, 1gbit, ... (as fast as it goes)")
    parser.add_argument("--ranks", type=int, help="start so many on each host by torchrun; COMMAND is then what follows `python`")
    parser.add_argument("--seconds", type=float, help="end what runs longer")
    parser.add_argument("command", metavar="COMMAND", nargs="+")
    args = parser.parse_args(argv)
    commands = torchrun(args.hosts, args.ranks, args.command) if args.ranks else [args.command] * args.hosts
    if reason := why_not():
        raise SystemExit(f"hosts.py: {reason}")
    try:
        return max(run(commands, args.rate, seconds=args.seconds), key=bool)
    except (HostsError, ValueError) as error:
        raise SystemExit(f"hosts.py: {error}") from error


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
