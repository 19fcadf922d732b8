"""Places the regions of a pipeline and prints the result; refuses what does not fit.

Offsets are decided here and nowhere else. Plain Python; kernels and `explain` use it.
"""

from __future__ import annotations

import attrs

from fa4core.pipeline.declare import DoesNotFit, Pipeline, Region


@attrs.frozen
class Placed:
    """A region at its place: stage `i` begins at `offset + i * stride`."""

    region: Region
    offset: int
    stride: int

    @property
    def end(self) -> int:
        return self.offset + self.stride * (self.region.stages - 1) + self.region.size

    def at(self, stage):
        """Where a stage begins; `stage` may be a device value."""
        return self.offset + stage * self.stride


def place(regions: tuple[Region, ...], limit: int, unit: str) -> dict[str, Placed]:
    """Offsets of all regions, in order of declaration, aliases inside their hosts.

    Raises:
        DoesNotFit: Saying what is asked for and what there is.
    """
    placed: dict[str, Placed] = {}
    top = 0
    for region in regions:
        if region.inside is None:
            stride = -(-region.size // region.align) * region.align
            offset = -(-top // region.align) * region.align
            placed[region.name] = Placed(region, offset, stride)
            top = offset + stride * region.stages
            continue
        host = placed[region.inside]
        if region.offset + region.size > host.region.size or region.stages != host.region.stages:
            raise DoesNotFit(
                f"{region.name}: {region.stages} x {region.size} {unit} at {region.offset} inside "
                f"{region.inside}, which has {host.region.stages} x {host.region.size}"
            )
        placed[region.name] = Placed(region, host.offset + region.offset, host.stride)
    if top > limit:
        listed = ", ".join(f"{r.name} {r.stages} x {r.size}" for r in regions if not r.inside)
        raise DoesNotFit(f"{top} {unit} for {listed}; {limit} exist")
    return placed


def describe(pipeline: Pipeline) -> str:
    """The declaration as a table: roles, signals with derived counts, memory with offsets."""
    lines = ["role         warps   registers"]
    for role in pipeline.roles:
        lines.append(f"  {role.name:<10} {role.first:>2}..{role.end - 1:<3} {role.registers:>6}")
    lines.append("signal       barriers  arrivals  by -> waiter")
    for signal in pipeline.signals:
        by = " + ".join(f"{name} ({how.name.lower()})" for name, how in signal.arrivals)
        shape = f"{signal.copies} x {signal.stages}"
        count = pipeline.count(signal)
        lines.append(f"  {signal.name:<10} {shape:>8} {count:>8}   {by} -> {' + '.join(signal.waiters)}")
    for title, regions, limit, unit in (
        ("shared memory", pipeline.smem, pipeline.limits.smem_bytes, "bytes"),
        ("tensor memory", pipeline.tmem, pipeline.limits.tmem_columns, "columns"),
        ("registers", pipeline.rmem, pipeline.limits.registers, "registers"),
    ):
        if not regions:
            continue
        placed = place(regions, limit, unit)
        top = max((p.end for p in placed.values()), default=0)
        lines.append(f"{title}: {top} of {limit} {unit}")
        for name, p in placed.items():
            inside = f"  in {p.region.inside}" if p.region.inside else ""
            lines.append(f"  {name:<10} {p.offset:>7}  {p.region.stages} x {p.region.size}{inside}")
    return "\n".join(lines)
