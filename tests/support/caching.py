"""``python tests/support/caching.py jaxrl_llm.train ...``: a command whose every host writes to the compilation cache.

On CPU each host has keys of its own in it, and jax lets the first one alone write: the others would compile at each
start, most of what a test of several processes takes.
"""

import runpy
import sys
import types

from jax._src import compiler

if __name__ == "__main__":
    compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    sys.path[0] = ""  # as of ``python -m``: the current folder, not this one
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
