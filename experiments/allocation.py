"""How this process gets its memory."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Has the C library keep freed memory for later, instead of returning it to the system.

    On CPUs, XLA allocates the temporary arrays of every call anew. From 32 MB on, glibc gets them
    from the system each time, which clears each page when it is first used: up to half the time of
    a small training step. Call this before threads begin. The process never shrinks then.

    Returns:
      Whether the C library is glibc, which alone has these settings.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
        return 0 not in [library.mallopt(*setting) for setting in settings]
    except (AttributeError, OSError, TypeError):  # Another C library, or none that can be found.
        return False
