"""Reads over RDMA: reliable connected queue pairs, through pyverbs (extra `[rdma]`).

    fabric      the ports of this machine and the addresses they have, from sysfs; which one a peer is reached by
    library     pyverbs, imported when it is first needed
    device      an open device and the memory registered with it
    queues      queue pairs: connected, posted to, polled, drained
    handshake   what both ends tell each other, over the tcp endpoint, before anything is read
    owner       memory that is open to RDMA, and to whom
    channel     the reader's end; see `gyre_transport.backends.channel`
    gpu         whether a GPU's memory is read directly or through the host
    direct      a GPU's memory, registered with the network card

A reader proves the descriptor's key before it gets a queue pair. Each grant has a protection domain of its own, so
those queue pairs open that grant's memory and no other; revoking deregisters the memory before it returns, so a read
that succeeded was over by then.
"""
