"""The network: services of the host, the machine around it, and sockets of other kinds."""

from __future__ import annotations

from tests.escape.attempt import ROOT, Attempt

ATTEMPTS = [
    Attempt(
        "tcp",
        "connect to a service on the host's 127.0.0.1, also by other names of it",
        """
        for host in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "localhost", "127.1"):
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
        "vsock",
        "make a socket to the hypervisor (AF_VSOCK), which no network namespace stops",
        "escaped(socket.socket(40, socket.SOCK_STREAM).fileno())",
        hardened=True,
    ),
    Attempt(
        "raw-sockets",
        "make raw IP sockets, and see every packet (AF_PACKET)",
        """
        made = []
        for family, protocol in ((socket.AF_INET, 1), (17, 0)):
            try:
                made.append(socket.socket(family, socket.SOCK_RAW, protocol).family)
            except OSError as error:
                refused = error
        if made: escaped(made)
        raise refused
        """,
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
