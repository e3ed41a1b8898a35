"""The command line: one file a verb, which parses its options, calls the code, and prints."""
