"""Reliable connected queue pairs with one completion queue.

    made ──connect──▶ ready ──an error, or `drain`──▶ failed (everything posted comes back as flushed) ──▶ closed

A queue pair tries for `patience` seconds, or up to four times that, as devices count, until a silent peer is an error:
never for ever, which seven retries mean to some. After an error the device still owns what was posted until it has come
back; `drain` waits for that, and `close` ends it in any case.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import time
from typing import Any

from gyre_transport.backends.verbs.device import Device
from gyre_transport.backends.verbs.fabric import Gid
from gyre_transport.backends.verbs.handshake import Side
from gyre_transport.errors import Unreachable

DEPTH = 32  # reads posted to a queue pair and not complete
_RETRIES = 6
_TICK, _LONGEST = 4.096e-6, 31  # a timeout of n is _TICK seconds * 2**n
_HOPS = 64
_POLL = 16  # completions at once


def timeout(patience: float) -> int:
    """The timeout of one try, as ibv counts, for all tries to take at least `patience` seconds."""
    return min(_LONGEST, max(1, math.ceil(math.log2(patience / (1 + _RETRIES) / _TICK))))


class QueuePairs:
    """`count` queue pairs in a protection domain. access: what the peer may do. Raises `Unreachable`."""

    def __init__(self, device: Device, domain: Any, gid: Gid, *, count: int, access: int = 0) -> None:
        v = self._v = device.v
        self._device, self._gid, self._access = device, gid, access
        self._pairs: list[Any] = []
        self._posted = [0] * count
        self._queue: Any = None
        self._into = v.wr.SGE(0, 0, 0)
        try:
            self._queue = device.make("completion queue", lambda: v.cq.CQ(device.context, count * DEPTH))
            for _ in range(count):
                self._pairs.append(device.make("queue pair", lambda: self._pair(domain)))
        except BaseException:
            self.close()
            raise
        # one request is filled in anew for every post, which copies it: pyverbs frees none by itself
        self._request = v.wr.SendWR(
            opcode=v.enums.IBV_WR_RDMA_READ, num_sge=1, sg=[self._into], send_flags=v.enums.IBV_SEND_SIGNALED
        )
        self._request.close()  # its own copy of the list
        self._request.sg_list = self._into
        self.side = Side(
            link=device.port.link,
            gid=gid.text,
            lid=device.lid,
            mtu=device.mtu,
            serves=device.serves,
            queue_pairs=tuple(pair.qp_num for pair in self._pairs),
            psn=secrets.randbits(24),
        )

    def _pair(self, domain: Any) -> Any:
        v, device = self._v, self._device
        made = v.qp.QPInitAttr(
            qp_type=v.enums.IBV_QPT_RC,
            scq=self._queue,
            rcq=self._queue,
            cap=v.qp.QPCap(max_send_wr=DEPTH, max_recv_wr=1),
            sq_sig_all=1,
        )
        attributes = v.qp.QPAttr(port_num=device.port.number)
        attributes.qp_access_flags = self._access
        return v.qp.QP(domain, made, attributes)

    def connect(self, peer: Side, patience: float) -> None:
        """Make each ready for its counterpart. patience: seconds. Raises `Unreachable`."""
        v, device, mine = self._v, self._device, self.side
        if len(peer.queue_pairs) != len(self._pairs):
            raise Unreachable(f"expected {len(self._pairs)} queue pairs of the peer, got {len(peer.queue_pairs)}")
        for pair, number in zip(self._pairs, peer.queue_pairs, strict=True):
            a = v.qp.QPAttr(port_num=device.port.number)
            a.qp_access_flags = self._access
            a.path_mtu = min(mine.mtu, peer.mtu)
            a.dest_qp_num = number
            a.rq_psn, a.sq_psn = peer.psn, mine.psn
            a.max_rd_atomic, a.max_dest_rd_atomic = min(device.asks, peer.serves), device.serves
            a.min_rnr_timer = 12
            a.timeout, a.retry_cnt, a.rnr_retry = timeout(patience), _RETRIES, _RETRIES
            route = v.addr.GlobalRoute(dgid=v.addr.GID(peer.gid), sgid_index=self._gid.index, hop_limit=_HOPS)
            a.ah_attr = v.addr.AHAttr(gr=route, is_global=1, port_num=device.port.number, dlid=peer.lid)
            try:
                pair.to_rts(a)
            except v.pyverbs_error.PyverbsError as e:
                there = ipaddress.IPv6Address(peer.gid)
                raise Unreachable(
                    f"no RDMA connection from {device.port} ({self._gid.address}) to {there.ipv4_mapped or there}: {e}"
                ) from e

    def post(self, number: int, address: int, nbytes: int, key: int, remote: int, rkey: int) -> bool:
        """Read `nbytes` at `remote` into `address`; False when no queue pair takes one more. number: comes back."""
        which = min(range(len(self._pairs)), key=self._posted.__getitem__)
        if self._posted[which] == DEPTH:
            return False
        into, request = self._into, self._request
        into.addr, into.length, into.lkey = address, nbytes, key
        request.wr_id = number << 8 | which
        request.set_wr_rdma(rkey, remote)
        try:
            self._pairs[which].post_send(request)
        except self._v.pyverbs_error.PyverbsError as e:
            raise Unreachable(f"the RDMA device {self._device.port} takes no read: {e}") from e
        self._posted[which] += 1
        return True

    def poll(self) -> list[tuple[int, int]]:
        """(number, ibv_wc_status) of reads that have ended since; 0: its bytes are in place."""
        _, came = self._queue.poll(_POLL)
        for c in came:
            self._posted[c.wr_id & 255] -= 1
        return [(c.wr_id >> 8, c.status) for c in came]

    def drain(self, within: float) -> None:
        """End what is posted: whatever has not come yet is flushed, or after `within` seconds left to `close`."""
        if not any(self._posted) or self._device.inherited:
            return
        v = self._v
        for pair in self._pairs:
            attributes = v.qp.QPAttr(port_num=self._device.port.number)
            attributes.qp_state = v.enums.IBV_QPS_ERR
            try:
                pair.modify(attributes, v.enums.IBV_QP_STATE)
            except v.pyverbs_error.PyverbsError:  # it is in that state, or the device is gone
                continue
        end = time.monotonic() + within
        while any(self._posted) and time.monotonic() < end:
            if not self.poll():
                time.sleep(0.001)

    def close(self) -> None:
        """Destroy them: nothing is written or read through them any more. Idempotent."""
        if self._device.inherited:
            return
        while self._pairs:
            self._pairs.pop().close()
        if self._queue is not None:
            self._queue.close()
            self._into.close()
            self._queue = None
