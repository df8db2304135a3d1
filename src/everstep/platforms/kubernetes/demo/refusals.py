"""Has the answers of an API server that refuses a request."""

from __future__ import annotations

from typing import Any

from everstep.platforms.kubernetes.api_client import ApiReason
from everstep.platforms.kubernetes.kinds import Object

Problem = tuple[str, str]

_CODES = {
    ApiReason.BAD_REQUEST: 400,
    ApiReason.UNAUTHORIZED: 401,
    ApiReason.FORBIDDEN: 403,
    ApiReason.NOT_FOUND: 404,
    ApiReason.ALREADY_EXISTS: 409,
    ApiReason.CONFLICT: 409,
    ApiReason.EXPIRED: 410,
    ApiReason.INVALID: 422,
    ApiReason.TOO_MANY: 429,
    ApiReason.OTHER: 415,
}


class RefusedRequest(Exception):
    """Says why the server refuses a request, as it answers it."""

    def __init__(self, reason: ApiReason, message: str, causes: tuple[tuple[str, str], ...] = ()) -> None:
        """Make a refusal. ``causes``: reason and message each."""
        super().__init__(message)
        self.code, self.reason, self.message, self.causes = _CODES[reason], reason, message, causes

    def status(self) -> Object:
        """Return the Status object."""
        details: dict[str, Any] = {}
        if self.causes:
            details["causes"] = [{"reason": reason, "message": message} for reason, message in self.causes]
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason.value,
            "details": details,
            "code": self.code,
        }


def not_found(plural: str, name: str) -> RefusedRequest:
    """Return the refusal for an object that is not there."""
    return RefusedRequest(ApiReason.NOT_FOUND, f'{plural} "{name}" not found')


def invalid(kind: str, name: str, *problems: tuple[str, str]) -> RefusedRequest:
    """Return the refusal for an object that breaks its schema or a rule. ``problems``: path and message each."""
    words = ", ".join(f"{path}: {message}" for path, message in problems)
    causes = tuple(("FieldValueInvalid", f"{path}: {message}") for path, message in problems)
    return RefusedRequest(ApiReason.INVALID, f'{kind} "{name}" is invalid: {words}', causes)
