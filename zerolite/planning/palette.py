"""Colours and letters of memory items, in a picture and in a terminal."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """letter: what stands for the item in a bar of text. rgb: its colour, the same everywhere."""

    letter: str
    rgb: tuple[int, int, int]

    @property
    def hex(self) -> str:
        return "#{:02x}{:02x}{:02x}".format(*self.rgb)

    @property
    def is_dark(self) -> bool:
        """Whether text on it should be white (relative luminance by ITU-R BT.709)."""
        red, green, blue = self.rgb
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128


LOOKS = {
    "compute_parameters": Look("P", (0x33, 0x22, 0x88)),
    "persistent_parameters": Look("K", (0x88, 0xCC, 0xEE)),
    "buffers": Look("F", (0x99, 0x99, 0x33)),
    "gradients": Look("G", (0xDD, 0xCC, 0x77)),
    "master_weights": Look("M", (0x11, 0x77, 0x33)),
    "optimizer_states": Look("O", (0x44, 0xAA, 0x99)),
    "communication_buckets": Look("B", (0x88, 0x22, 0x55)),
    "gathered_parameters": Look("L", (0xAA, 0x44, 0x99)),
    "offload_buffers": Look("S", (0x66, 0x66, 0x66)),
    "activations": Look("A", (0xCC, 0x66, 0x77)),
    "other": Look("X", (0xDD, 0xDD, 0xDD)),
}
"""Of every item of zerolite.utils.memory_items.ITEMS, in their order. The colours are Paul Tol's "muted" scheme
(https://personal.sron.nl/~pault/), which people with any common colour blindness can tell apart, and a dark grey."""


def spoken(item: str) -> str:
    """The name of an item as people read it."""
    return item.replace("_", " ")
