"""Output of the ranks: of rank 0 on the terminal, of the others in files, or both for all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from zerolite.launcher.failures import TAIL_LINES

_TAIL_BYTES = 16384
_POLL_INTERVAL_S = 0.05
_PROMPT_S = 0.3
_CHUNK = 1 << 20  # bytes read at once


class RankLogs(LogsSpecs):
    """Files of each rank in a directory: `rank_3.out`, `rank_3.err`, and `rank_3.json` with its failure.

    Args:
        directory: an existing directory, which the nodes of a job may share.
        keep_all: rank 0 writes to files too, from which its lines are copied to the terminal.
        tee: ranks whose lines also go to the terminal, with `[rank 3] ` in front; None for all.
        extra: additional environment variables of each rank.
    """

    def __init__(self, directory: str, keep_all: bool, tee: Collection[int] | None, extra: dict[str, str]) -> None:
        super().__init__()
        self._directory = directory
        self._keep_all = keep_all
        self._tee_ranks = tee
        self._extra = extra
        self.outputs: dict[int, list[str]] = {}
        self.error_files: dict[int, str] = {}
        self._tails: list[LogTail] = []

    @property
    def root_log_dir(self) -> str:
        return self._directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the ranks, and complete the ranks' environments ``envs``, by local rank."""
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            paths = [os.path.join(self.root_log_dir, f"rank_{rank}.{suffix}") for suffix in ("out", "err", "json")]
            self.outputs[rank] = paths[:2] if rank != 0 or self._keep_all else []
            self.error_files[rank] = paths[2]
            destination.stdouts[local_rank], destination.stderrs[local_rank] = self.outputs[rank] or ["", ""]
            destination.error_files[local_rank] = paths[2]
            env.update(TORCHELASTIC_ERROR_FILE=paths[2], **self._extra)
        return destination

    def start_tee(self) -> None:
        """Start to copy lines to the terminal. Called once the ranks have been started."""
        for stream, place in ((sys.stdout, 0), (sys.stderr, 1)):
            shown = {
                rank: paths[place]
                for rank, paths in self.outputs.items()
                if paths and (rank == 0 or self._tee_ranks is None or rank in self._tee_ranks)
            }
            if stream is not None and shown:  # it may have been closed when the job was started
                self._tails.append(LogTail(shown, stream.buffer))

    def stop_tee(self) -> None:
        """Copy the rest, and stop. Called when the ranks have ended."""
        for tail in self._tails:
            tail.stop()
        self._tails.clear()

    def tail(self, rank: int) -> str:
        """Return the last lines of a rank's standard error; "" if it goes to the terminal."""
        last = b""
        with contextlib.suppress(OSError):  # the directory may have been removed
            if self.outputs[rank]:
                with open(self.outputs[rank][1], "rb") as file:
                    file.seek(max(0, os.path.getsize(file.name) - _TAIL_BYTES))
                    last = b"\n".join(file.read().rstrip().splitlines()[-TAIL_LINES:])
            free = shutil.disk_usage(self.root_log_dir).free
            if free < _TAIL_BYTES:
                why = f"what is missing could not be written: {free} bytes are free in {self.root_log_dir}"
                last += f"\n({why})".encode()
        return last.decode(errors="replace").strip()


class LogTail:
    """Thread that copies the output of several ranks to the terminal until :meth:`stop`.

    torch's TailLog is not used. It writes half a line if a write crosses a page of the file, and takes the `\\r` of a
    progress bar for the end of a line.

    Args:
        paths: files of the ranks. Lines of rank 0 are copied as they are, those of others behind `[rank 3] `.
        stream: the terminal.
    """

    def __init__(self, paths: dict[int, str], stream: BinaryIO) -> None:
        self._files = {rank: open(path, "rb") for rank, path in paths.items()}
        self._partial_lines = dict.fromkeys(paths, b"")  # lines without an end so far
        self._read_at = dict.fromkeys(paths, 0.0)
        self._stream = stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerolite output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy the rest, and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0 if self._copy() else _POLL_INTERVAL_S):
            pass
        # Only what has been written until now: a process that is left behind may write for ever.
        behind = max(os.fstat(file.fileno()).st_size - file.tell() for file in self._files.values())
        for _ in range(behind // _CHUNK):
            self._copy()
        self._copy(last=True)

    def _copy(self, last: bool = False) -> bool:
        """Copy what is new, and return whether there was anything. ``last``: partial lines too."""
        text = b"".join([self._read(rank, last) for rank in self._files])
        if text:
            with contextlib.suppress(OSError):  # the terminal has gone
                self._stream.write(text)
                self._stream.flush()
        return bool(text)

    def _read(self, rank: int, last: bool) -> bytes:
        data, now = self._files[rank].read(_CHUNK), time.monotonic()
        if data:
            self._read_at[rank] = now
        text = self._partial_lines[rank] + data
        end = text.rfind(b"\n") + 1
        if rank == 0:  # a progress bar, or a prompt behind which nothing follows for a moment
            end = len(text) if now - self._read_at[rank] > _PROMPT_S else max(end, text.rfind(b"\r") + 1)
        if last or len(text) - end > _CHUNK:
            end = len(text)
        self._partial_lines[rank] = text[end:]
        if rank == 0 or not end:
            return text[:end]
        return b"".join(b"[rank %d] %s\n" % (rank, line) for line in text[:end].removesuffix(b"\n").split(b"\n"))
