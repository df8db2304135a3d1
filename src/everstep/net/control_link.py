"""Is one connection of a client to the master."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.errors import InternalError, WireError
from everstep.ids import NodeId
from everstep.model.member import Address
from everstep.net.auth import Identity, Secret, authenticate_client
from everstep.net.frames import (
    AUTH_LIMITS,
    CONTROL_LIMITS,
    FrameDecoder,
    FrameKind,
    FrameSocket,
    decode_header,
    encode_frame,
)
from everstep.net.messages import Answered, Call, OrderType, RequestType, Return
from everstep.net.retry import Deadline
from everstep.net.sockets import connect

_TICK_S = 0.1

_encoder = msgspec.msgpack.Encoder()
_return_decoder = msgspec.msgpack.Decoder(Return)
_order_decoder: msgspec.msgpack.Decoder[OrderType] = msgspec.msgpack.Decoder(OrderType)


class ControlLink:
    """Sends calls to the master and receives its answers and orders. One thread receives; any may send or shut down,
    one at a time."""

    __slots__ = ("_decoder", "_stream")

    def __init__(self, stream: FrameSocket) -> None:
        self._stream = stream
        self._decoder = FrameDecoder(CONTROL_LIMITS)

    def prove(self, secret: Secret, identity: Identity, deadline: Deadline) -> None:
        """Prove who we are. Raises SecretError, VersionError, WireError, DeadlineError."""
        authenticate_client(self._stream, secret, identity, deadline)
        self._stream.set_ticks(_TICK_S, 1.0)

    def send(self, frames: bytes, deadline: Deadline) -> None:
        """Send frames as they are. Raises WireError, DeadlineError."""
        self._stream.send_raw(frames, deadline=deadline)

    def ask(
        self, call_id: int, request: RequestType, deadline: Deadline, idle: Callable[[], None]
    ) -> tuple[Answered, list[OrderType]]:
        """Send a request and wait for its answer; ``idle()`` is called at each tick without a message. Returns the
        answer and the orders that came with or before it. Answers to other calls, of before, are dropped. Raises
        WireError, DeadlineError, and what ``idle`` raises."""
        self.send(call_frame(call_id, request), deadline)
        orders: list[OrderType] = []
        answer: Answered | None = None
        while answer is None:
            while (messages := self.messages()) is None:
                idle()
                deadline.check()
            for message in messages:
                if not isinstance(message, Return):
                    orders.append(message)
                elif message.id == call_id:
                    answer = message.answer
        return answer, orders

    def messages(self) -> list[Return | OrderType] | None:
        """Return what has come; None: nothing came within a tick. Raises WireError at the connection's end."""
        data = self._stream.recv_bytes()
        if data is None:
            return None
        if data == b"":
            raise WireError("the master closed the connection")
        return [_decode_message(frame.kind, frame.header) for frame in self._decoder.feed(data)]

    def shutdown(self) -> None:
        """End the connection from any thread: who receives on it meets its end."""
        self._stream.shutdown()

    def close(self) -> None:
        """Close the socket; only by the thread that receives."""
        self._stream.close()


def connect_control(
    address: Address, run_dir: Path | None, secret: Secret, node: NodeId, deadline: Deadline
) -> ControlLink:
    """Connect to the master at ``address``. Raises WireError or DeadlineError."""
    return ControlLink(
        connect(address, node=node, run_dir=run_dir, secret=secret, limits=AUTH_LIMITS, tls=True, deadline=deadline)
    )


def call_frame(call_id: int, request: RequestType) -> bytes:
    """Encode a request as it is sent. Raises InternalError where it is beyond the wire's limit."""
    header = _encoder.encode(Call(call_id, request))
    if len(header) > CONTROL_LIMITS.header_bytes:
        raise InternalError(f"{request_name(request)} of {len(header)} bytes is beyond the wire's limit")
    return encode_frame(FrameKind.CALL, header)


def request_name(request: RequestType) -> str:
    """Return a request's name on the wire."""
    return str(request.__struct_config__.tag)


def _decode_message(kind: int, header: bytes) -> Return | OrderType:
    if kind == FrameKind.RETURN:
        return decode_header(_return_decoder, header, "answer of the master")
    if kind == FrameKind.ORDER:
        return decode_header(_order_decoder, header, "order of the master")
    raise WireError(f"unexpected frame of kind {kind} from the master")
