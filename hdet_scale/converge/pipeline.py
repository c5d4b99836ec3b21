"""Converge: theta_r <- mean over replicas of theta, elementwise on local shards, in place.

The order of a converge:

1. `healthy`: one read of the local tensors; a replica with a non-finite element must be known
   before anything is summed, since 0 x NaN is NaN.
2. one small exchange of the flags (the round sends its losses along).
3. `average`: the buckets of the plan under way one behind the other (hdet_scale.converge.flights).
   A replica that is left out contributes nothing and receives the others' mean.

Nothing is written before step 3; when no replica is healthy every rank raises the same error
there, with its tensors as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet_scale.converge.buckets import DIRECT_BYTES, Bucket, Plan, check_same_plan, join, plan
from hdet_scale.converge.checks import check_choice, check_int
from hdet_scale.converge.flights import Flights
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.overlap import Pending
from hdet_scale.converge.policy import BUCKET_BYTES
from hdet_scale.converge.transfers import Outcome, Transfer
from hdet_scale.converge.wires import FULL_PRECISION, WIRES
from hdet_scale.topology import Replicas, local

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NoHealthyReplicaError(RuntimeError):
    """Every replica has a non-finite parameter or loss: there is nothing to average."""


class Converge:
    """Averages tensors in place across replicas, each time it is called.

    Args:
        tensors: what is averaged, dense and floating-point, the same on every replica. Of a DTensor
            the local shard is averaged; a tensor listed twice, or tied, is averaged once.
        replicas: who takes part.
        bucket_bytes: cap of a staging bucket in bytes (default 32 MiB). The fp32 wire needs two
            buckets of extra memory at most, allocated at the first converge and kept. Tensors of
            1 MiB or more are averaged where they lie. 16-bit tensors are summed in fp32.
        wire: what is sent (default "fp32"), a name of `hdet_scale.converge.wires.WIRES`. "bf16"
            halves the bytes and rounds every value to bf16. "int8" sends the difference from the
            last converged point with error feedback, and keeps two more fp32 copies. Each gives
            the same bits on every rank.
        fragments: parts of the buckets that can be averaged one at a time (default 1).
        outer: an outer optimizer step after the mean (default None: the mean itself).
        background: the averaging will be started with `start` (default False). The replicas must
            then have a process group that the training step does not use
            (`hdet_scale.converge.overlap.with_own_group`).
        plain: further tensors that take the mean itself, whatever the wire and the outer step
            (default none): moments and buffers, which an extrapolation or a quantised difference
            could make negative.

    Returns:
        A call returns an `Outcome`: which replicas are in the mean, seconds, bytes sent.

    Raises:
        TypeError, ValueError: for an argument that is not valid, at construction; at the first call
            also for replicas whose tensors differ, the same error on every rank.
        NoHealthyReplicaError: when called, if every replica has a non-finite element; the tensors
            are as they were.

    Limitations:
        Calls are collective over `replicas.group`. A tensor with gaps or overlaps in its memory is
        refused. The tensors must stay where they are: make a new Converge when they are replaced.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        replicas: Replicas,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        wire: str = "fp32",
        fragments: int = 1,
        outer: OuterStep | None = None,
        background: bool = False,
        plain: Iterable[Tensor] = (),
    ) -> None:
        check_int("bucket_bytes", bucket_bytes, at_least=1)
        check_int("fragments", fragments, at_least=1)
        check_choice("wire", wire, WIRES)
        self.tensors = distinct(tensors)
        self.plain = distinct(plain)
        self.replicas = replicas
        self.fragments = fragments
        self._in_place = fragments == 1 and not background
        built = {w: WIRES[w].build(replicas, self.device) for w in (FULL_PRECISION, wire)}
        self._wire, self._full_precision = built[wire], built[FULL_PRECISION]
        planned = self._plan(self.tensors, bucket_bytes)
        self.plan = join(planned, self._plan(self.plain, bucket_bytes))
        self._transfers = self._assigned(len(planned.buckets), outer)
        self._flights = Flights(
            self.plan, self._transfers, replicas, self._full_precision, self.device
        )
        self._plans_compared = False

    def _plan(self, tensors: list[Tensor], bucket_bytes: int) -> Plan:
        cap = bucket_bytes
        for wire in dict.fromkeys((self._full_precision, self._wire)):
            cap = wire.bucket_cap(cap, self.device)
        if self.fragments > 1:
            # Several buckets for each fragment, so that fragments come out equal.
            cap = max(1, min(cap, sum(t.nbytes for t in tensors) // (4 * self.fragments)))
        return plan(
            tensors,
            bucket_bytes=cap,
            direct_bytes=DIRECT_BYTES if self._in_place else None,
            cut_direct=not self._wire.in_place,
            itemsize=4,
        )

    def _assigned(self, first_plain: int, outer: OuterStep | None) -> list[Transfer]:
        """What to do with each bucket; those from `first_plain` on take the mean itself."""
        fragments = _fragment_of(self.plan.buckets, self.fragments)
        found = []
        for index, bucket in enumerate(self.plan.buckets):
            plain = index >= first_plain
            whole = bucket.dtype == torch.float64 or (plain and self._wire.remembers)
            found.append(
                Transfer(
                    index=index,
                    bucket=bucket,
                    wire=self._full_precision if whole else self._wire,
                    outer=None if plain else outer,
                    fragment=fragments[index],
                )
            )
        return found

    @property
    def device(self) -> torch.device:
        """Where the small exchange of a round takes place."""
        known = self.tensors or self.plain
        return known[0].device if known else torch.device("cpu")

    @torch.no_grad()
    def __call__(self, *, healthy: bool = True) -> Outcome:
        """Check the tensors, exchange the result, average.

        Args:
            healthy: False leaves this replica out of the mean (default True).
        """
        fine = healthy and self.healthy()
        rows = self.replicas.exchange([float(fine)], self.device)
        return self.average([row[0] == 1.0 for row in rows])

    @torch.no_grad()
    def healthy(self, fragment: int | None = None, *, snapshot: bool = False) -> bool:
        """Whether every local element is finite. One read, one host synchronisation.

        Args:
            fragment: the part to read (default None: all).
            snapshot: make the copy that `start` needs now, and check it on the way (default False);
                for a `start` that follows before the tensors change.
        """
        views = self._views(fragment)
        if not views:
            return True
        if snapshot:
            found = self._flights.copy_checked(self._chosen(fragment))
        else:
            found = [v.sum(dtype=_summed(v)) for v in views]
        if bool(torch.stack([f.to(self.device) for f in found]).isfinite().all()):
            return True
        # A sum may overflow although its terms are finite: only now look at each element.
        return all(bool(v.isfinite().all()) for v in views)

    @torch.no_grad()
    def average(self, included: Sequence[bool], fragment: int | None = None) -> Outcome:
        """Average without a check.

        Args:
            included: for each replica whether it is in the mean, the same on every rank.
            fragment: the part to average (default None: all).
        """
        begin = self._flights.clock.begin()
        chosen = self._check(included, fragment)
        self._flights.average(chosen, included)
        sent = sum(t.sent_bytes for t in chosen)
        return Outcome(tuple(included), self._flights.clock.end(begin), sent)

    @torch.no_grad()
    def start(self, included: Sequence[bool], fragment: int | None = None) -> Pending:
        """Begin the averaging in the background; `finish()` of the result folds it in:

            theta <- theta_now + (mean - theta_at_start)

        theta_at_start is the copy that `healthy` has made, or is copied now. A replica that is left
        out takes the mean as it is.

        Args:
            included: for each replica whether it is in the mean, the same on every rank.
            fragment: the part to average (default None: all).

        Limitations:
            The converge needs `background=True`. One copy of what is averaged is kept beside the
            staging.
        """
        return Pending(self._flights, self._check(included, fragment), included)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that are kept from one converge to the next."""
        wires = {self._full_precision, self._wire}
        return self._flights.shelf.nbytes + sum(wire.shelf.nbytes for wire in wires)

    def transfers(self) -> list[Transfer]:
        """What is done with each bucket, in their order. On meta tensors what a GPU would do:
        nothing needs to be allocated or connected to plan a converge."""
        return list(self._transfers)

    def replicas_equal(self) -> bool:
        """Whether all replicas hold the same bits, by a checksum: one read, one exchange."""
        total = 0
        for s in self.plan.spans:
            whole = s.view(_INTEGER[s.dtype.itemsize]).sum(dtype=torch.int64)
            total = (total * 1000003 + int(whole)) % 2**52  # exact as a float64
        rows = self.replicas.exchange([float(total)], self.device)
        return all(row == rows[0] for row in rows)

    def _views(self, fragment: int | None) -> list[Tensor]:
        if fragment is None:
            return list(self.plan.spans)
        return [v for t in self._chosen(fragment) for v in self.plan.views(t.bucket)]

    def _chosen(self, fragment: int | None) -> list[Transfer]:
        return [t for t in self._transfers if fragment is None or t.fragment == fragment]

    def _check(self, included: Sequence[bool], fragment: int | None) -> list[Transfer]:
        """The buckets to average; errors, the same on every rank, before anything is written."""
        if len(included) != self.replicas.size:
            raise ValueError(
                f"one flag for each of {self.replicas.size} replicas, got {len(included)}"
            )
        if not any(included):
            raise NoHealthyReplicaError(
                f"none of the {self.replicas.size} replicas has finite parameters and losses: "
                "the parameters are left as they were. Resume from the last checkpoint with a "
                "lower learning rate or spread"
            )
        if self.replicas.size == 1:
            return []
        if not self._plans_compared:
            check_same_plan(self.plan, self.replicas, self.device)
            self._plans_compared = True
        return self._chosen(fragment)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next converge builds on, by bucket. The last converged points and the outer
        momenta are equal on all replicas; the residuals of a wire are each replica's own."""
        return self._flights.remembered.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run's converges, with the same tensors and caps."""
        self._flights.remembered.load_state_dict(state, self.plan.buckets)

    def forget_residuals(self) -> None:
        """Start a wire's error feedback anew: what a checkpoint for all replicas does."""
        self._flights.remembered.residuals.clear()


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local memory of each tensor, a tensor listed twice only once."""
    return [local(t) for t in {id(t): t for t in tensors}.values()]


def _fragment_of(buckets: Sequence[Bucket], fragments: int) -> list[int]:
    """The part that each bucket belongs to: contiguous, equal in elements as far as can be."""
    total, seen, parts = max(1, sum(b.numel for b in buckets)), 0, []
    for b in buckets:
        middle = seen + b.numel // 2
        parts.append(min(fragments - 1, fragments * middle // total))
        seen += b.numel
    return parts


def _summed(view: Tensor) -> torch.dtype:
    return torch.float64 if view.dtype == torch.float64 else torch.float32
