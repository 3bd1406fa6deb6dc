"""Reads through Mooncake's transfer engine, over tcp: used only where `transport.backends` of both ends names it.

engine   the process's engine, and transfers that are under way in it
owner    memory that is lent to the engine, to readers that have proven its key
channel  the reader's end

The engine knows no keys, no generations and no cancellation: it serves a name and an address, and keeps what it once
learned of a name. So the descriptor's own tcp line stands beside it. The owner says over that line where the memory
lies, before a transfer and again after it, each time against a proof of the key; what was read is thrown away unless
nothing has changed in between. With every transfer goes a read of a few bytes that only the owner has, so that what
another process sends under an old name is never taken for the owner's. Nothing is read straight into a destination: a
transfer that was given up may write as long as it likes, to memory that nobody looks at any more.

What it cannot be given: whoever reaches the engine's ports, which are open on every address of the machine, may read
and overwrite what is lent to it. Name it in `transport.backends` on a network that nobody else is on, or not at all.
"""
