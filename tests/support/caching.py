"""``python tests/support/caching.py jaxrl_llm.train ...``: run a command whose every host writes the compilation cache.

On CPU each host has its own keys, and jax lets only the first host write. The other hosts would compile at each start,
which takes most of the time of a test of several processes.
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
