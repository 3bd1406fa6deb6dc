"""Memory of a GPU, behind the interface of memory of the host: a tensor on one is registered and read into alike.

    memory      what is asked of a GPU: copies to and from pinned memory; which kinds there are
    cuda        the same of an NVIDIA GPU; needs torch, which whoever has such a tensor has
    ring        a bounded piece of pinned memory, used in turn
    staged      the reader's end: bytes come into the ring, are found valid, and only then go to the GPU
    outlet      the owner's end: bytes leave the GPU for pinned memory just before they are sent

Over RDMA the network card reaches the GPU itself where the driver allows (`backends.verbs.direct`).
"""
