"""Lets a ps be started ahead: it has imported all that a ps needs, and waits for the word which ps it is.

A new Python process takes half a second of a processor for its imports, and a ps that was lost is waited for.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.storage.atomic import private

FLAG = "--spare"
"""The first argument of a ps that was started ahead."""

MAX_BYTES = 64 * 1024


class PsRole(msgspec.Struct, frozen=True):
    """Is the word which ps to be: the arguments of ``everstep.ps``, and the file that its output goes to."""

    arguments: tuple[str, ...]
    log: str


_decoder = msgspec.msgpack.Decoder(PsRole)


def encode_role(role: PsRole) -> bytes:
    """Return what goes to the descriptor."""
    return msgspec.msgpack.encode(role)


def wait_for_role() -> PsRole | None:
    """Return the role once it comes, and send the output to its log; None: nobody needs this process any more.

    It comes as one packet on the standard input. Whoever started this process holds the other end, which ends with
    them.
    """
    data = os.read(0, MAX_BYTES)
    if not data:
        return None
    role = _decoder.decode(data)
    with Path(os.devnull).open("rb") as nothing, open(Path(role.log), "ab", opener=private) as out:
        for stream, file in enumerate((nothing, out, out)):
            os.dup2(file.fileno(), stream)
    return role
