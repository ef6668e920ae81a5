"""Python in a process of its own, without the wait: forked from one that has imported torch and transformers only."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"])


@dataclass
class Started:
    """A process at work."""

    process: BaseProcess
    files: tempfile.TemporaryDirectory[str]

    def end(self, timeout: float = 500) -> CompletedProcess[str]:
        """Wait for it; one that takes too long is killed."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        out, err = ((Path(self.files.name) / name).read_text() for name in ("out", "err"))
        self.files.cleanup()
        return CompletedProcess([], self.process.exitcode or 0, out, err)


def start(code: str, *arguments: str, **environment: str) -> Started:
    """Begin to run the code, with `sys.argv` and the environment as given."""
    files = tempfile.TemporaryDirectory()
    for name in ("out", "err"):
        (Path(files.name) / name).touch()
    process = SERVER.Process(target=_run, args=(code, arguments, dict(os.environ) | environment, files.name))
    process.start()
    return Started(process, files)


def python(code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """Run the code to its end."""
    return start(code, *arguments, **environment).end()


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY), number)
    sys.argv = ["-c", *arguments]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
