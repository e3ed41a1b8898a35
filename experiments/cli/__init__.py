"""The command line: its commands, and the way from arguments to an exit status."""
