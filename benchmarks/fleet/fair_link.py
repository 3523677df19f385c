"""A link that its connections share fairly: ``tc htb`` with a queue for each, as the simulator has it.

A token bucket has one queue, which drops what comes last: one connection of five had half of such a link for as long
as it lasted. Queues that are fair by themselves (fq_codel, sfq) are not in every kernel. So each connection has a class
of its own, which a few instructions of classic BPF find by its trainer's port and its server, and the classes
take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.testbed.testbed import PIECE_BYTES, bucket_sizes

PORTS = range(30208, 30720)
"""Ports of the trainers' ends of connections; a power of two of them, the first one a multiple of it."""
_FIRST_CLASS = 0x10
_ROOT_CLASS = 0x1
_SOURCE_AT, _PORT_AT = 29, 36
"""Last byte of the source's address and the destination's port, in a frame of Ethernet and IPv4 without options."""
_LOAD_BYTE, _LOAD_HALF = 0x30, 0x28
_AND, _SHIFT, _ADD, _ADD_X = 0x54, 0x64, 0x04, 0x0C
_TO_X, _RETURN = 0x07, 0x16
_Instruction = tuple[int, int]


def fair_link(device: str, bandwidth: float, servers: int) -> str:
    """Return the lines of ``tc -batch`` for a device without a queue.

    Args:
        device: that sends to the trainers.
        bandwidth: bits per second of all connections.
        servers: whose answers cross it; a power of two. Their addresses follow each other.
    """
    rate, (burst, limit) = f"{int(bandwidth)}bit", bucket_sizes(bandwidth)
    bursts = f"burst {burst} cburst {burst}"
    lines = [
        f"qdisc add dev {device} root handle 1: htb",
        f"class add dev {device} parent 1: classid 1:{_ROOT_CLASS:x} htb rate {rate} {bursts}",
    ]
    parent, share = f"dev {device} parent 1:{_ROOT_CLASS:x}", f"rate 1kbit ceil {rate} quantum {PIECE_BYTES}"
    for number in range(_FIRST_CLASS, _FIRST_CLASS + servers * len(PORTS)):
        lines += [
            f"class add {parent} classid 1:{number:x} htb {share} {bursts}",
            f"qdisc add dev {device} parent 1:{number:x} bfifo limit {limit}",
        ]
    code = _class_of_frame(servers)
    words = ",".join([str(len(code)), *(f"{what} 0 0 {value}" for what, value in code)])
    lines.append(
        f"filter add dev {device} parent 1: protocol ip prio 1 bpf bytecode '{words}' classid 1:{_ROOT_CLASS:x}"
    )
    return "\n".join(lines) + "\n"


def _class_of_frame(servers: int) -> Sequence[_Instruction]:
    """Classic BPF that returns the number of a frame's class; frames that are not of TCP over IPv4 have none."""
    return (
        (_LOAD_BYTE, _SOURCE_AT),
        (_AND, servers - 1),
        (_SHIFT, len(PORTS).bit_length() - 1),
        (_TO_X, 0),
        (_LOAD_HALF, _PORT_AT),
        (_AND, len(PORTS) - 1),
        (_ADD_X, 0),
        (_ADD, (1 << 16) + _FIRST_CLASS),
        (_RETURN, 0),
    )
