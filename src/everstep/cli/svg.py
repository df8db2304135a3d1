"""Makes pieces of the pictures that commands draw: text, and a panel's axis over time."""

from __future__ import annotations

from xml.sax.saxutils import escape

from everstep.monitor.node_costs import HOUR_S

WIDTH, LEFT, RIGHT = 860, 60, 20
INK = "#333333"


def begin(height: int) -> list[str]:
    """Return the head of a picture and its white ground."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]


def axis(base: float, panel: float, length_s: float, most: str) -> list[str]:
    """Return the axis below a panel of this height. ``most``: at its upper end."""
    end = f"{length_s / HOUR_S:.1f} h" if length_s >= HOUR_S else f"{length_s:.0f} s"
    return [
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{INK}"/>',
        f'<line x1="{LEFT}" y1="{base}" x2="{LEFT}" y2="{base - panel + 14}" stroke="{INK}"/>',
        text(LEFT - 45, base - panel + 20, most, 12),
        text(LEFT - 45, base, "0", 12),
        text(LEFT, base + 18, "0", 12),
        text(WIDTH - RIGHT - 50, base + 18, end, 12),
    ]


def x_of(t: float, length_s: float) -> float:
    """Return where a time is, from left to right."""
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(t, 0.0), length_s) / length_s


def text(x: float, y: float, words: str, size: int, colour: str = INK) -> str:
    """Return words at a place."""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(words)}</text>'
