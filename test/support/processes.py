"""Python in processes of their own that need not import PyTorch again, which takes 4 s of CPU time.

They are forked from one that has imported it, and nothing of dpa.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["torch"])


def run_python(*command, env=None, cwd=None):
    """What ``python -c CODE`` or ``python -m MODULE ARGUMENTS...`` does, as ``subprocess.run``."""
    command = list(map(str, command))
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        given = command, dict(os.environ if env is None else env), str(cwd or os.getcwd()), files
        process = _forked.Process(target=_run, args=given)
        process.start()
        process.join()
        printed = [file.read_text() for file in files]
    return subprocess.CompletedProcess(command, process.exitcode, *printed)


def _run(command, env, cwd, files):
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    how, what, *arguments = command
    sys.argv, sys.orig_argv = [how, *arguments], [sys.executable, *command]
    status = 0
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
