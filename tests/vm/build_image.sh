#!/bin/bash
# Builds an initramfs for tests/vm: busybox, the host's Python, this tree and its dependencies.
# usage: build_image.sh MODULES_DIR SITE_PACKAGES OUTPUT
set -euo pipefail
modules=$1 site=$2 output=$3
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,tmp,run,root,etc,var/lib,modules,usr/bin,usr/sbin,usr/lib/x86_64-linux-gnu,usr/lib64,capsule,site}
ln -s usr/lib "$root/lib"; ln -s usr/lib64 "$root/lib64"; rmdir "$root/bin"; ln -s usr/bin "$root/bin"; ln -s usr/sbin "$root/sbin"

copy_with_libraries() {  # a program and what it links to
  install -D "$(readlink -f "$1")" "$root$1"
  { ldd "$1" 2>/dev/null | grep -oE '/[^ ]+' || true; } | sort -u | while read -r library; do
    target=$library
    case $target in /lib/*|/lib64/*) target=/usr$target ;; esac
    [ -e "$root$target" ] || install -D "$(readlink -f "$library")" "$root$target"
  done
}
for program in /usr/bin/python3.11 /usr/bin/bash /usr/bin/ls /usr/bin/cat /usr/bin/sleep /usr/bin/true /usr/bin/false \
    /usr/bin/env /usr/bin/id /usr/bin/yes /usr/bin/dd /usr/bin/head /usr/bin/seq /usr/bin/touch /usr/bin/mkdir /usr/bin/rm /usr/bin/cp \
    /usr/bin/mv /usr/bin/ln /usr/bin/chmod /usr/bin/stat /usr/bin/df /usr/bin/nproc /usr/bin/printf /usr/bin/tr /usr/bin/wc /usr/bin/sort \
    /usr/bin/grep /usr/bin/kill /usr/bin/ps /usr/bin/stty /usr/bin/tty /usr/bin/setsid /usr/bin/runuser /usr/sbin/runuser /usr/sbin/mkfs.ext4 /usr/bin/base64; do
  [ -e "$program" ] && copy_with_libraries "$program"
done
ln -sf python3.11 "$root/usr/bin/python3"
ln -sf bash "$root/usr/bin/sh"
install "$(command -v busybox)" "$root/usr/bin/busybox"
cp /etc/mke2fs.conf "$root/etc/" 2>/dev/null || true
mkdir -p "$root/usr/lib/python3.11"
(cd /usr/lib/python3.11 && tar c --exclude=test --exclude=idlelib --exclude='config-*' --exclude=ensurepip .) | tar x -C "$root/usr/lib/python3.11"
find "$root/usr/lib/python3.11/lib-dynload" "$site/msgspec" -name '*.so' | while read -r so; do
  { ldd "$so" | grep -oE '/[^ ]+' || true; } | sort -u | while read -r library; do
    target=$library; case $target in /lib/*) target=/usr$target ;; esac
    [ -e "$root$target" ] || install -D "$(readlink -f "$library")" "$root$target"
  done
done
# Compiled files come along where there are any: in an emulated machine compiling takes longer than all the rest.
(cd "$site" && tar c msgspec structlog typing_extensions.py) | tar x -C "$root/site"
(cd "$tree" && tar c src sdk/python/src spec tests/vm pyproject.toml agent/build/capsule-agent agent/build_agent.py) | tar x -C "$root/capsule"
for module in overlay loop; do find "$modules" -name "$module.ko" -exec cp {} "$root/modules/" \; ; done
printf 'root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n' > "$root/etc/passwd"
printf 'root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n' > "$root/etc/group"
mkdir -p "$root/etc/pam.d"
install -m 755 "$here/init" "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) > "$output"
