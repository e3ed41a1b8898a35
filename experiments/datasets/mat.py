"""Reads a MATLAB file in a process of its own, for `archives.load_mat`; it imports no project code.

Its arguments are folders to import from, the limits of time in seconds and of memory in bytes, the
file, and the names of variables. Standard output is a pickle of plain values, or of a sentence on
what is wrong.
"""

import os
import pickle
import sys


def plain(value):
    """Dictionaries, lists, strings, numbers and arrays of numbers."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list) or (hasattr(value, "dtype") and value.dtype.kind == "O"):
        return [plain(item) for item in value]
    if isinstance(value, str | bytes | int | float | complex) or value.dtype.kind in "biufcSU":
        return value
    raise TypeError(f"a variable has the type {type(value).__name__}")


def main(libraries, seconds, room, path, *names):
    """Reads within the limits and writes."""
    sys.path += libraries.split(os.pathsep)
    from scipy.io import loadmat

    try:
        import resource

        for limit, most in (("CORE", 0), ("CPU", int(seconds)), ("AS", int(room))):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    except (ImportError, ValueError, OSError):
        pass  # Windows has no limits; others may have lower ones.
    try:
        content = loadmat(path, appendmat=False, simplify_cells=True, variable_names=names)
        found = {name: plain(content[name]) for name in names if name in content}
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:300]}"
    pickle.dump(found, sys.stdout.buffer, protocol=5)


if __name__ == "__main__":
    main(*sys.argv[1:])
