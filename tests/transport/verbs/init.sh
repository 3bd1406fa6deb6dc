#!/bin/sh
# First process of the virtual machine: modules, the host's files read-only, a network with soft-RoCE, then the job.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "FAILED insmod $module"; done </modules/order

value() { tr ' ' '\n' </proc/cmdline | while IFS='=' read -r name rest; do [ "$name" = "$1" ] && echo "$rest"; done; }
out=$(value gyre.out)
address=$(value gyre.address)

mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro files /system || { echo FAILED files; poweroff -f; }
for dir in /proc /sys /dev; do mount --move "$dir" "/system$dir"; done
mkdir -p /system/dev/shm /system/dev/pts
for dir in /dev/shm /run /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs "/system$dir"; done
mount -t devpts devpts /system/dev/pts
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none out "/system$out" || { echo FAILED out; poweroff -f; }

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
ip link set lo up
ip link set eth0 mtu 4200 up
ip addr add "$address/24" dev eth0
chroot /system rdma link add rxe0 type rxe netdev eth0 || echo FAILED rxe0
chroot /system /bin/sh -c "cd '$out' && sh ./job >job.log 2>&1; echo \$? >rc.new; mv rc.new rc"
umount "/system$out"
poweroff -f
