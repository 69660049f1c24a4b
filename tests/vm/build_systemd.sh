#!/bin/bash
# Builds the machine of test_systemd.py: Debian with systemd, two ordinary users, and Capsule's dependencies. As root.
# usage: build_systemd.sh PYTHON MIRROR FOLDER
# FOLDER gets disk.ext4, vmlinuz, initrd, and python/, which compiles the tree for it. What is tried there is on a second disk.
set -euo pipefail
python=$1 mirror=$2 folder=$3
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
scratch=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root
packages=systemd-sysv,dbus-user-session,libpam-systemd,login,passwd,python3,procps,e2fsprogs,kmod,linux-image-cloud-amd64
mmdebstrap --quiet --variant=apt --include=$packages --dpkgopt=force-unsafe-io --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    trixie "$scratch/root.tar" "deb $mirror trixie main"
mkdir "$root" && tar -xf "$scratch/root.tar" -C "$root" && rm "$scratch/root.tar"

version=$(basename "$(readlink "$root/usr/bin/python3")")
install -d "$root/opt/site" "$root/opt/capsule"
"$python" -m pip install -q --disable-pip-version-check --target "$root/opt/site" --only-binary=:all: --python-version "${version#python}" \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
    -r "$tree/requirements/run.txt" $(grep -hoE '^(pytest|pytest-asyncio|iniconfig)==.*' "$tree"/requirements/*.txt | sort -u)
chroot "$root" python3 -m compileall -qq /opt/site /usr/lib/"$version" || true

for user in dev:1000 lone:1001; do
    chroot "$root" useradd --create-home --uid "${user#*:}" --shell /bin/bash "${user%:*}"
done
: >"$root/etc/fstab"
printf '%032x\n' 1 >"$root/etc/machine-id" # a first boot has more to do
touch "$root/etc/.updated" "$root/var/.updated"
echo capsule-vm >"$root/etc/hostname"
echo 'LANG=C.UTF-8' >"$root/etc/default/locale"
cat >"$root/etc/systemd/system/checks.service" <<END
[Unit]
Description=The checks
After=systemd-logind.service dbus.service systemd-user-sessions.service
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStartPre=/usr/bin/mount -o ro /dev/vdb /opt/capsule
ExecStart=/usr/bin/python3 /opt/capsule/tests/vm/systemd_machine.py
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=multi-user.target
END
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../checks.service "$root/etc/systemd/system/multi-user.target.wants/checks.service"
# Seconds from the last logout to the end of a user's manager: by default ten.
install -d "$root/etc/systemd/logind.conf.d"
printf '[Login]\nUserStopDelaySec=2\n' >"$root/etc/systemd/logind.conf.d/quick.conf"
# What takes long in an emulated machine, and that nothing here needs.
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-binfmt.service \
    systemd-firstboot.service ldconfig.service systemd-hwdb-update.service systemd-journal-catalog-update.service \
    modprobe@.service serial-getty@ttyS0.service getty.target apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-pstore.service systemd-random-seed.service systemd-timesyncd.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

mv "$root"/boot/vmlinuz-* "$scratch/vmlinuz"
mv "$root"/boot/initrd.img-* "$scratch/initrd"
mkdir -p "$scratch/python/usr/bin" "$scratch/python/usr/lib"
cp -a "$root/usr/lib/$version" "$root/usr/lib/x86_64-linux-gnu" "$scratch/python/usr/lib/" # to compile what is tried
cp "$root/usr/bin/$version" "$scratch/python/usr/bin/python3"
mke2fs -q -t ext4 -d "$root" "$scratch/disk.ext4" 1500M
cp "$0" "$scratch/recipe"
rm -rf "$root" "$folder"
trap - EXIT
mv "$scratch" "$folder"
