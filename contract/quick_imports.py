"""Imports during which the garbage collector rests.

What a program imports stays until its end: the collector would find nothing, each time that it
looks through it all, and that takes a good part of the time in which a program starts.

`python -P -m embedfarm.contract.quick_imports embedfarm.workers.main --device cpu-0` imports a
module so, and runs its function `main` as a program.
"""

import contextlib
import gc
import sys
from collections.abc import Iterator
from importlib import import_module


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Let the garbage collector rest in the block, which should do nothing but import."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def main() -> int:
    """Run the module that the first argument names, with the arguments behind it."""
    del sys.argv[0]
    with quick_imports():
        module = import_module(sys.argv[0])
    gc.freeze()  # no collection looks at what was imported
    status: int = module.main()
    gc.freeze()  # nor does the interpreter's end
    return status


if __name__ == "__main__":
    sys.exit(main())
