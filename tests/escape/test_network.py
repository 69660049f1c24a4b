"""The network: services of the host, the machine around it, and sockets of other kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.escape.attempt import ROOT, Attempt, cases, proofs

pytestmark = pytest.mark.real

Check = Callable[[Attempt], None]

ATTEMPTS = [
    Attempt(
        "tcp-loopback",
        "connect to a service on the host's 127.0.0.1",
        "escaped(socket.create_connection(('127.0.0.1', A['port']), 2).recv(100))",
        actors=("tcp_service",),
    ),
    Attempt(
        "tcp-mapped",
        "connect to it by other names: 0.0.0.0, ::ffff:127.0.0.1, localhost, 127.1",
        """
        for host in ("0.0.0.0", "::ffff:127.0.0.1", "localhost", "127.1"):
            try:
                escaped(socket.create_connection((host, A["port"]), 2).recv(100))
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("tcp_service",),
    ),
    Attempt(
        "tcp-without-connect",
        "reach it by sendto with MSG_FASTOPEN, which needs no connect",
        """
        s = socket.socket()
        s.settimeout(2)
        s.sendto(b"x", 0x20000000, ("127.0.0.1", A["port"]))
        escaped(s.recv(100))
        """,
        actors=("tcp_service",),
        hardened=True,
    ),
    Attempt(
        "udp",
        "send a datagram to a service of the host",
        """
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", A["port"]))
        time.sleep(0.05)
        """,
        actors=("udp_mailbox",),
    ),
    Attempt(
        "listen-for-host",
        "listen on a port of the host, where others would take it for a service",
        """
        s = socket.create_server(("127.0.0.1", 0))
        with open("/proc/net/tcp") as file:
            lines = len(file.readlines())
        if lines > 2 + A["mine"]: escaped(f"{lines} sockets of others beside mine")
        """,
        args={"mine": 0},
        actors=("tcp_service",),
    ),
    Attempt(
        "metadata",
        "ask the cloud's metadata service for credentials",
        """
        for host in ("169.254.169.254", "fd00:ec2::254"):
            try:
                socket.create_connection((host, 80), 1)
                escaped(host)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="only machines of a cloud have one",
    ),
    Attempt(
        "outside",
        "send a packet to the internet, by UDP and by ping",
        """
        for kind, protocol in ((socket.SOCK_DGRAM, 0), (socket.SOCK_DGRAM, 1)):
            try:
                socket.socket(socket.AF_INET, kind, protocol).sendto(b"x" * 16, ("192.0.2.1", 53))
                escaped("sent")
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="the machine may have no network, and others should not be sent packets",
    ),
    Attempt(
        "resolve",
        "have a name looked up, which tells a server elsewhere",
        """
        found = socket.getaddrinfo("example.org", 80)
        escaped(found[0][4])
        """,
        proof="the machine may have no network, and others should not be asked",
    ),
    Attempt(
        "interfaces",
        "see an interface that is not the loopback",
        """
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        if names: escaped(names)
        absent("it has no other")
        """,
    ),
    Attempt(
        "vsock",
        "make a socket to the hypervisor (AF_VSOCK), which no network namespace stops",
        "escaped(socket.socket(40, socket.SOCK_STREAM).fileno())",
        hardened=True,
    ),
    Attempt(
        "crypto-sockets",
        "make a socket of the kernel's crypto interface (AF_ALG)",
        """
        try:
            escaped(socket.socket(38, socket.SOCK_SEQPACKET).fileno())
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT: absent("this kernel has no AF_ALG")
            raise
        """,
    ),
    Attempt(
        "packet-sockets",
        "see every packet (AF_PACKET)",
        "escaped(socket.socket(17, socket.SOCK_RAW, 0).fileno())",
        proof=ROOT,
    ),
    Attempt(
        "raw-sockets",
        "make raw IP sockets",
        "escaped(socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).fileno())",
        proof=ROOT,
    ),
    Attempt(
        "netlink",
        "talk to other parts of the kernel by netlink: events, audit, firewall, SELinux, crypto",
        """
        made = []
        for protocol in (4, 6, 7, 9, 12, 15, 16, 21):
            try:
                made.append(socket.socket(16, socket.SOCK_RAW, protocol).fileno())
            except OSError as error:
                refused = error
        if made: escaped(made)
        raise refused
        """,
        hardened=True,
    ),
    Attempt(
        "odd-families",
        "make sockets of rare families, with rare bugs: X.25, TIPC, RDS, Bluetooth, CAN, XDP …",
        """
        made = []
        usual = (1, 2, 10, 16)
        for family in set(range(46)) - set(usual):
            for kind in (1, 2, 3, 5):
                if tried("socket", family, kind, 0) == 0: made.append(family)
        if made: escaped(made)
        """,
        proof="which of them there are differs from kernel to kernel",
    ),
    Attempt(
        "family-high-bits",
        "make an AF_VSOCK socket with bits set that the kernel ignores and a filter may not",
        "escaped(call('socket', 40 | 1 << 32, 1, 0))",
        hardened=True,
    ),
    Attempt(
        "rare-protocols",
        "make SCTP, MPTCP, DCCP, UDP-Lite and L2TP sockets, which load kernel modules",
        """
        made = []
        for kind, protocol in ((1, 132), (1, 262), (6, 33), (2, 136), (2, 115), (5, 132)):
            if tried("socket", 2, kind, protocol) == 0: made.append(protocol)
        if made: escaped(made)
        """,
        hardened=True,
    ),
    Attempt(
        "abstract-socket",
        "connect to an abstract Unix socket of the host",
        """
        s = socket.socket(socket.AF_UNIX)
        s.connect("\\0" + A["abstract"])
        escaped(s.recv(100))
        """,
        actors=("abstract_service",),
    ),
    Attempt(
        "unix-socket",
        "connect to a Unix socket of the host by its path",
        """
        s = socket.socket(socket.AF_UNIX)
        s.connect(A["unix"])
        escaped(s.recv(100))
        """,
        actors=("unix_service",),
    ),
    Attempt(
        "pair-to-socket",
        "send to one through an end of a socket pair, by giving sendto an address",
        """
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            try:
                socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", A["unix"])
            except OSError as error:
                refused = error
        time.sleep(0.05)
        raise refused
        """,
        actors=("unix_mailbox",),
    ),
    Attempt(
        "daemons",
        "connect to daemons of the host: Docker, containerd, D-Bus, systemd, X11, the SSH agent",
        """
        paths = "/run/docker.sock /var/run/docker.sock /run/containerd/containerd.sock"
        paths += " /run/dbus/system_bus_socket /run/systemd/private /tmp/.X11-unix/X0 /dev/log"
        refused = FileNotFoundError(2, "none")
        for path in [*paths.split(), "\\0/tmp/.X11-unix/X0", "\\0/tmp/dbus-x"]:
            try:
                socket.socket(socket.AF_UNIX).connect(path)
                escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="a machine may have none of them",
    ),
    Attempt(
        "raise-interface",
        "be allowed to configure the network (asked to set what is set)",
        """
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(s, 0x8913, request)
        fcntl.ioctl(s, 0x8914, request)
        escaped("allowed")
        """,
        proof=ROOT,
    ),
]


@cases(ATTEMPTS)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)
