"""A child process that behaves as its first argument says."""

import os
import signal
import subprocess
import sys
import threading

from gyre_transport.process import follow_parent, ready

how = sys.argv[1]
print(f"child {how}", flush=True)
if how == "early":
    print("no such model", file=sys.stderr, flush=True)
    sys.exit(3)
follow_parent(grace=0.2 if how == "deaf" else 20.0)
if how == "orphaning":  # a grandchild holds the pipe; this process ends without a word
    holder = subprocess.Popen(["/bin/sleep", "600"], pass_fds=[int(os.environ["GYRE_READY_FD"])])
    print(holder.pid, flush=True)
    sys.exit(4)
stop = threading.Event()
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else lambda *_: stop.set())
if how == "garbage":
    os.write(int(os.environ["GYRE_READY_FD"]), b"hello\n")
elif how == "silent":
    os.close(int(os.environ["GYRE_READY_FD"]))
elif how != "never":
    ready(pid=os.getpid())
    print("left:", *sorted(name for name in os.environ if name.startswith("GYRE_")), flush=True)
while not stop.wait(0.05):
    pass
print("stopped in order", flush=True)
