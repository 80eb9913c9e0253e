"""The simulator `xpyd-sim` as a process that ends with its parent: `python -m tests.disaggregated.xpyd_process serve`.

Nobody here wrote it: a worker by its own idea of one, which prefills or decodes, and takes its time for either.
"""

from __future__ import annotations

import sys

from xpyd_sim.cli import main

from example_app.parent import stop_when_stdin_closes

if __name__ == "__main__":
    stop_when_stdin_closes()
    main([argument for argument in sys.argv[1:] if argument != "--until-stdin-closes"])
