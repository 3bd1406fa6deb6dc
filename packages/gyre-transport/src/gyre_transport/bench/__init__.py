"""How fast memory of another process is read here, every way that works, beside what moves bytes without Gyre.

owner    a process that holds the memory and serves it every way, the peers' too
peers    plain sockets, ZeroMQ, Mooncake's tcp engine (where it is installed)
paths    the reader's end: every way into one buffer, all of it at once or small pieces
measure  rounds that take the ways in turn, so that a busy machine is busy for all; medians, and ratios in a round
command  `gyre-transport bench`
"""
