"""One module a dialect: its request in, its answer, its stream and its errors out, over one internal conversation."""
