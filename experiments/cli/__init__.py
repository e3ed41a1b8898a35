"""The command line: one file a command, which parses its options, calls the code, and prints."""
