"""Devices: make a node, open one, or see which there are."""

from __future__ import annotations

import os

from tests.escape.attempt import ROOT, Attempt

ATTEMPTS = [
    Attempt(
        "mknod-disk",
        "make a node of the host's disk and read it",
        """
        try:
            os.mknod("disk", stat.S_IFBLK | 0o600, A["disk"])
            escaped(os.read(os.open("disk", os.O_RDONLY), 16))
        except PermissionError:
            if os.getuid() == 0: absent("not even root may open the disk")
            raise
        """,
        proof=ROOT,
        args={"disk": os.stat("/").st_dev},
    ),
    Attempt(
        "mknod-high-bits",
        "the same, with bits set in the mode that the kernel ignores and a filter may not",
        """
        mode = stat.S_IFCHR | 0o600 | (1 << 40)
        call("mknodat", -100, b"log", mode, os.makedev(1, 11))
        if stat.S_ISCHR(os.stat("log").st_mode): escaped("made")
        """,
        proof=ROOT,
    ),
    Attempt(
        "open-nodes",
        "open a device of the host: kvm, fuse, tun, vsock, userfaultfd, hwrng, input, msr …",
        """
        names = "kvm fuse net/tun vsock vhost-vsock userfaultfd hwrng uinput input/event0 rtc0"
        names += " cpu/0/msr snapshot nvram hpet loop-control btrfs-control console tty0 tty1 ttyS0"
        names += " vcs vda sda nvme0n1 zram0 dm-0 mapper/control dri/card0 snd/timer autofs kmsg"
        own = ["fuse", "net/tun"] if A.get("gvisor") else []  # made up by gVisor, for everybody
        opened = []
        for name in set(names.split()) - set(own):
            try:
                os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK)
                opened.append(name)
            except OSError as error:
                refused = error
        if opened: escaped(opened)
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "see-devices",
        "see devices of the host in /dev",
        """
        usual = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
        usual += ["mqueue"]  # of the container's own IPC namespace
        usual += ["capsule-sudo"]  # no device: where programs ask for root inside
        if A.get("gvisor"): usual += ["fuse", "net"]  # of gVisor's own making
        more = sorted(set(os.listdir("/dev")) - set(usual))
        if more: escaped(more[:5])
        """,
    ),
    Attempt(
        "write-disk-by-number",
        "reach a block device through /proc or /sys",
        """
        for path in "/proc/partitions /proc/diskstats /sys/block /dev/disk /dev/block".split():
            try:
                found = os.listdir(path) if os.path.isdir(path) else open(path).read()
                if found: escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
    ),
]
