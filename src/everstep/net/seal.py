"""Authenticates frames one by one, where a connection between nodes is not encrypted (``--tls control``).

Behind each frame there are 16 bytes: AES-256-GMAC over all of it, by a key of that connection and direction alone
(out of the handshake, ``auth.py``) and the number of the frame as its nonce. So nobody on the way can write, change,
leave out, repeat or reorder a frame; anybody there can read them.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any

from everstep.errors import WireError

_AT_ONCE_BYTES = 64 * 1024  # so much is put together first: a call for each piece costs more


class Seal:
    """Seals one direction of one connection; for one thread at a time, as its frames are."""

    def __init__(self, key: bytes) -> None:
        """Take ``key``: 32 bytes, never used for anything else."""
        # Costs 0.1 s and some MB: only who speaks to other nodes in the clear needs it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        def in_pieces(nonce: bytes) -> Any:
            return Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()

        self._at_once, self._in_pieces = AESGCM(key), in_pieces
        self._frames = 0

    def __repr__(self) -> str:
        return f"<Seal {self._frames} frames>"  # never the key

    def tag(self, pieces: Sequence[Any]) -> bytes:
        """Return the tag of the next frame, which consists of these pieces (bytes, flat memoryviews)."""
        nonce = self._frames.to_bytes(12, "little")
        self._frames += 1
        if sum(len(piece) for piece in pieces) <= _AT_ONCE_BYTES:
            return self._at_once.encrypt(nonce, b"", b"".join(pieces))
        whole = self._in_pieces(nonce)
        for piece in pieces:
            whole.authenticate_additional_data(piece)
        whole.finalize()
        return bytes(whole.tag)

    def check(self, pieces: Sequence[Any], tag: bytes) -> None:
        """WireError: the next frame was not sent so by the peer."""
        if not hmac.compare_digest(self.tag(pieces), tag):
            raise WireError("a frame is not as the peer sent it: somebody on the way wrote, or bytes changed")
