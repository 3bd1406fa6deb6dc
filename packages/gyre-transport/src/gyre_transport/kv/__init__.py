"""KV pages that move with a request from one engine to another, so that what was computed is not computed again.

    engine A (its scheduler process)                      engine B
    linker ──offload──▶ store (registered memory)         linker ◀──lookup, load── store
                          │ service ◀── Lookup ───────── service ◀── Pull(A, tokens) ── proxy
                          └──────── one-sided read of the leased slots ────────▶ store

`linker` is what SGLang loads; it alone imports torch and SGLang. The scheduler loop of an engine only ever talks to its
own store: whatever another machine does, it waits for nothing. What cannot be had is computed again, and counted.

    config     section [kv], and what a linker is given       protocol   messages of a linker's service
    store      page slots: keys, order of use, pins, leases    pull       the destination's side of a move
    pages      between the engine's pool and a store           service    the thread that answers
    linker     SGLang's side                                   counts     what happened, as numbers in a file
"""
