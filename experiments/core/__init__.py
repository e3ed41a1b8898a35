"""What all rooms share: what a protocol is, options, processes, storage, errors."""
