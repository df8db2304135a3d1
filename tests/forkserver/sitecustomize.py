"""On the path of the processes that tests start: those that would spend their first seconds with imports become the
shadow of a fork of a process that has done them already: masters, ps, templates, and scripts that a test starts with
``python -X fork SCRIPT``. Where no fork server runs, Python goes on as ever."""

import os
import sys

if "EVERSTEP_TEST_FORKSERVER" in os.environ:
    wanted = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:4] else ""
    if wanted in ("everstep.agent.template", "everstep.master", "everstep.ps") or "fork" in sys._xoptions:
        from shadow import shadow

        shadow(os.environ["EVERSTEP_TEST_FORKSERVER"], wanted)
