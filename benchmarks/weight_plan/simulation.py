"""A push, hop by hop, over links that all carry the same: does the time follow from the bytes?

Each rank sends one message at a time and receives one at a time, both in the plan's order. It receives the next but one
only when the first of its two buckets is free again.
"""

from collections import defaultdict

from millrace.weights.transfer.messages import Hop
from millrace.weights.transfer.plan import TransferPlan


def simulated_span(plan: TransferPlan) -> int:
    """Bytes that a link carries from the start of the push to its end, as `TransferPlan.span`."""
    sending: defaultdict[int, int] = defaultdict(int)
    receiving: defaultdict[int, int] = defaultdict(int)
    there: dict[tuple[int, int], int] = {}
    """When a rank has a message."""
    gone: dict[tuple[int, int], int] = {}
    """When a rank has sent a message."""
    buckets: defaultdict[int, list[int]] = defaultdict(list)
    for hop in _in_order(plan):
        number = hop.message.number
        held = buckets[hop.target]
        begin = max(sending[hop.source], receiving[hop.target], there.get((hop.source, number), 0))
        if len(held) >= 2:
            before = (hop.target, held[-2])
            begin = max(begin, gone.get(before, there[before]))
        end = begin + hop.message.nbytes
        sending[hop.source] = receiving[hop.target] = there[hop.target, number] = gone[hop.source, number] = end
        held.append(number)
    return max(receiving.values(), default=0)


def _in_order(plan: TransferPlan) -> list[Hop]:
    """All hops once, in an order in which every rank does its own."""
    waiting = {rank: plan.hops(rank)[::-1] for rank in range(plan.size)}
    order = []
    ranks = list(waiting)
    while ranks:
        rank = ranks.pop()
        while waiting[rank]:
            hop = waiting[rank][-1]
            other = hop.target if hop.source == rank else hop.source
            if waiting[other][-1] != hop:
                break
            waiting[rank].pop()
            waiting[other].pop()
            order.append(hop)
            ranks.append(other)
    return order
