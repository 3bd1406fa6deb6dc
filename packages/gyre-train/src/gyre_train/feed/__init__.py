"""The feed: everything between a finished execution and a micro-step. See `gyre_train.feed.service`."""
