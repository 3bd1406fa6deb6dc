"""Model folders (Hugging Face: safetensors shards, config, tokenizer) from one process to another, on any machine.

    with serve(Path("model")) as served:              owner
        served.ticket.write(Path("model.ticket"))     mode 0600; take it to the other machine
    pull(Ticket.load(Path("model.ticket")), Path("copy"), deadline=3600)      receiver

The ticket is the right to read, and proves what is read: it holds the digest of the listing, which holds the digests of
every piece of every file.
"""

from gyre_transport.folder.listing import Listing, Ticket
from gyre_transport.folder.pull import Pulled, pull
from gyre_transport.folder.serve import Served, serve

__all__ = ["Listing", "Pulled", "Served", "Ticket", "pull", "serve"]
